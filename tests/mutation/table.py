"""The mutants: faults written by hand, one a line, in a file for each area (``areas/*.txt``).

A line is ``id ;; file below basis_rl/ ;; old text => new text ;; what the mutant does``, in which ``¶`` stands for the
end of a line. A fifth field says why no test can tell the mutant from the code. ``tests:`` names the tests (files or
folders, relative to ``tests/``) that are run first for the mutants below it. Lines that start with ``#`` are comments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AREAS = Path(__file__).with_name("areas")


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        area: the name of the file that it is written in.
        id: ``area/name``.
        path: of the changed file, relative to the repository.
        old: text that is there exactly once.
        new: what it becomes.
        meaning: in words.
        equivalent: why nothing can tell it from the code; empty as a rule.
        tests: those that are run first, relative to the repository.
    """

    area: str
    id: str
    path: str
    old: str
    new: str
    meaning: str
    equivalent: str
    tests: tuple[str, ...]

    def apply(self, tree: Path) -> str:
        """Change the file in `tree` and return what it was.

        Raises:
            ValueError: the old text is not there exactly once.
        """
        file = tree / self.path
        if not file.is_file():
            raise ValueError(f"{self.id}: there is no file {self.path}.")
        before = file.read_text()
        if before.count(self.old) != 1:
            raise ValueError(f"{self.id}: {before.count(self.old)} times in {self.path}, not once: {self.old!r}")
        file.write_text(before.replace(self.old, self.new))
        return before


def read_area(path: Path) -> list[Mutant]:
    """The mutants of one file.

    Raises:
        ValueError: a line that does not have the form above.
    """
    tests: tuple[str, ...] = ()
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("tests:"):
            tests = tuple(f"tests/{name}" for name in line.removeprefix("tests:").split())
        elif line.strip() and not line.startswith("#"):
            fields = [field.strip() for field in line.split(" ;; ")]
            change = f"{fields[2]} ".split(" => ") if len(fields) in (4, 5) else []  # to nothing, perhaps
            if len(change) != 2 or not all(fields[:4]) or not tests:
                raise ValueError(f"{path.name}, line {number}: no mutant (or no `tests:` above it): {line}")
            old, new = (text.strip().replace("¶", "\n") for text in change)
            name, file, _, meaning, *rest = fields
            equivalent = rest[0] if rest else ""
            found.append(
                Mutant(path.stem, f"{path.stem}/{name}", f"basis_rl/{file}", old, new, meaning, equivalent, tests)
            )
    return found


def read_table(areas: Sequence[str] = ()) -> list[Mutant]:
    """All mutants, or those of some areas.

    Raises:
        ValueError: no such area, an id that is there twice, a mutant that changes nothing.
    """
    files = {path.stem: path for path in sorted(AREAS.glob("*.txt"))}
    unknown = sorted(set(areas) - set(files))
    if unknown:
        raise ValueError(f"There is no area {unknown}; there are {', '.join(files)}.")
    mutants = [mutant for name, path in files.items() if not areas or name in areas for mutant in read_area(path)]
    ids = [mutant.id for mutant in mutants]
    wrong = sorted({name for name in ids if ids.count(name) > 1} | {m.id for m in mutants if m.old == m.new})
    if wrong:
        raise ValueError(f"Mutants that are there twice, or change nothing: {wrong}")
    return mutants
