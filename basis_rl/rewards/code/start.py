"""``start.py FOLDER:FOLDER... SCRIPT ...``: runs a script as the main module, which can import the packages in the
folders and nothing beside them. It is run for each test, and so imports nothing."""

import builtins
import sys


class Packages:
    """A finder of the import system."""

    def __init__(self, folders: str) -> None:
        self.folders = {folder.rpartition("/")[2]: folder for folder in folders.split(":")}

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """Of a package that was given."""
        if name not in self.folders:
            return None
        from importlib.util import spec_from_file_location

        folder = self.folders[name]
        return spec_from_file_location(name, f"{folder}/__init__.py", submodule_search_locations=[folder])


if __name__ == "__main__":
    sys.meta_path.append(Packages(sys.argv[1]))
    del sys.argv[:2]
    # Programs end by these without an import. The module `site`, which has them, is not loaded.
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    main = type(sys)("__main__")
    main.__file__ = sys.argv[0]
    # Not the module of this file: pickle and dataclasses look for a program's classes there.
    sys.modules["__main__"] = main
    with open(sys.argv[0], "rb") as file:
        exec(compile(file.read(), sys.argv[0], "exec"), main.__dict__)
