"""Starting the owner of a sandbox, as this user or as one without any rights."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

OWNER = Path(__file__).with_name("owner.py")
ATTACKS = Path(__file__).with_name("attacks.py")
USERS = ["self", "nobody"] if os.getuid() == 0 else ["self"]


def command_as(user: str, command: list[str]) -> list[str]:
    """`command` as this user or as nobody, who finds the interpreter even where that lies in somebody's closed home."""
    if user == "self":
        return command
    if not all(shutil.which(name) for name in ("unshare", "mount", "setpriv")):
        pytest.skip("needs unshare, mount and setpriv to become nobody")
    script = "set -e; mount -t tmpfs none /mnt; chmod 755 /mnt;"
    for closed, inside in _closed().items():
        names = " ".join(shlex.quote(name) for name in inside)
        script += f'for name in {names}; do mkdir "/mnt/$name"; mount --rbind {closed}/"$name" "/mnt/$name"; done;'
        script += f"mount --rbind /mnt {closed};"
    script += f"exec setpriv --reuid 65534 --regid 65534 --clear-groups --bounding-set=-all {shlex.join(command)}"
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]


def _closed() -> dict[str, list[str]]:
    """Folders that others may not enter, above interpreter and project; and what is needed of them."""
    result: dict[str, list[str]] = {}
    for path in (Path(sys.executable).resolve(), Path(sys.prefix), OWNER):
        for folder in reversed(path.parents):
            if not folder.stat().st_mode & 0o001:
                names = result.setdefault(str(folder), [])
                name = path.relative_to(folder).parts[0]
                names += [name] if name not in names else []
                break
    return result


def own(user: str, **request: object) -> dict:
    """What `tests.sandbox.owner` reports of a request."""
    command = command_as(user, [sys.executable, str(OWNER), json.dumps(request)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tempfile.gettempdir(), check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
