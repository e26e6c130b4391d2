"""What a bubblewrap sandbox may see of this machine: programs and libraries, and a copy of harmless parts of /etc."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import gristmill

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store", "/gnu/store")
LARGEST = 4 << 20  # bytes of a file of /etc that is copied
# Patterns below /etc. What others may not read is never copied, and nothing where keys or accounts are usual.
# fmt: off
ETC = (
    "ca-certificates.conf", "crypto-policies/back-ends", "debian_version", "default/locale",
    "gai.conf", "host.conf", "ImageMagick-*", "inputrc", "java", "java-*", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "locale.alias", "locale.conf", "localtime", "lsb-release", "magic", "magic.mime", "mailcap",
    "mime.types", "networks", "os-release", "perl", "php", "pki/ca-trust/extracted", "pki/tls/cert.pem",
    "pki/tls/certs", "pki/tls/openssl.cnf", "profile", "protocols", "python3*", "R", "rpc", "services", "shells",
    "ssl/openssl.cnf", "terminfo", "timezone",
)
# fmt: on
# Folders of /etc that hold nothing but public files, hundreds of them: shown as they are, since a copy takes seconds
# on a busy disk.
PUBLIC = ("alternatives", "fonts", "ssl/certs")


def binds() -> list[str]:
    """bubblewrap options for the system's programs and libraries, read-only; links stay links (`/bin` → `usr/bin`)."""
    options: list[str] = []
    for name in SYSTEM:
        path = Path(name)
        if path.is_symlink():
            options += ["--symlink", os.readlink(path), name]  # noqa: PTH115 - as it is written
        elif path.is_dir():
            options += ["--ro-bind", name, name]
    return options


def kernel_switches() -> list[str]:
    """bubblewrap options that make read-only what of /proc could change the whole machine.

    Only for root: /proc lets the owner write, and the owner it still is, whatever its number and powers are inside.
    """
    if os.geteuid():
        return []
    options: list[str] = []
    for entry in sorted(os.scandir("/proc"), key=lambda entry: entry.name):
        if entry.name.isdigit() or entry.is_symlink():
            continue
        if _writable(entry):
            options += ["--ro-bind-try", entry.path, entry.path]
    return options


def _writable(entry: os.DirEntry[str]) -> bool:
    """Whether its owner may write it, or something below it."""
    try:
        if not entry.is_dir(follow_symlinks=False):
            return bool(entry.stat(follow_symlinks=False).st_mode & 0o222)
        with os.scandir(entry.path) as below:
            return any(_writable(one) for one in below)
    except OSError:
        return True  # what cannot be looked at cannot be judged harmless


def hidden(more: Iterable[Path] = ()) -> list[str]:
    """bubblewrap options that put an empty directory over what lies below a bound one and is not the system's.

    That is this package with its checkout, its virtual environment, the current directory, and `more`.
    """
    package = Path(gristmill.__file__).resolve().parent
    checkout = package.parents[1]
    own = [package, Path.cwd(), *more]
    if (checkout / "pyproject.toml").is_file():
        own.append(checkout)
    if sys.prefix != sys.base_prefix:
        own.append(Path(sys.prefix))
    roots = [Path(name).resolve() for name in SYSTEM if Path(name).is_dir()]
    options: list[str] = []
    for path in sorted({path.resolve() for path in own}):
        if path.is_dir() and any(root in path.parents for root in roots) and not any(path in r.parents for r in roots):
            options += ["--tmpfs", str(path)]
    return options


def etc_binds(copy: Path) -> list[str]:
    """bubblewrap options that put a copy made by `copy_etc` in the place of /etc, public folders included."""
    options = ["--ro-bind", str(copy), "/etc"]
    for name in PUBLIC:
        if (copy / name).is_dir():
            options += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
    return options


def copy_etc(target: Path, *, user: str, uid: int, host: str) -> None:
    """Fill a new directory that can stand for /etc: harmless parts of this machine's, made accounts and hosts."""
    for path in _harmless():
        copy = target / path.relative_to("/etc")
        with contextlib.suppress(OSError):
            if path.is_symlink():
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.symlink_to(os.readlink(path))  # noqa: PTH115
            elif path.is_dir():
                copy.mkdir(parents=True, exist_ok=True)
            elif _readable_by_all(path):
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
    for name in PUBLIC:
        if Path("/etc", name).is_dir():
            (target / name).mkdir(parents=True, exist_ok=True)
    made = {
        "passwd": f"root:x:0:0:root:/root:/usr/sbin/nologin\n{user}:x:{uid}:{uid}:{user}:/home/{user}:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        "group": f"root:x:0:\n{user}:x:{uid}:\nnogroup:x:65534:\n",
        "hosts": f"127.0.0.1 localhost {host}\n::1 localhost ip6-localhost ip6-loopback\n",
        "hostname": f"{host}\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
        "resolv.conf": "",
    }
    for name, text in made.items():
        (target / name).write_text(text)
    (target / "mtab").symlink_to("/proc/self/mounts")


def _harmless() -> Iterator[Path]:
    for pattern in ETC:
        for path in sorted(Path("/etc").glob(pattern)):
            yield path
            if path.is_dir() and not path.is_symlink():
                yield from (below for below in sorted(path.rglob("*")) if "private" not in below.parts)


def _readable_by_all(path: Path) -> bool:
    found = path.stat()
    return stat.S_ISREG(found.st_mode) and bool(found.st_mode & stat.S_IROTH) and found.st_size <= LARGEST
