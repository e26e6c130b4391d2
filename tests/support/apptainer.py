"""A stand-in for Apptainer's command line, which cannot be had everywhere: what gristmill calls, by bubblewrap.

It keeps instances as the real one does, as JSON below `~/.apptainer`, each a process of its own that outlives the call;
`exec` enters its namespaces. An image is a file that holds one word, what is special about it. What it does not know it
refuses. Run as a program, it is `apptainer`.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import site
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

IMAGES = {"docker://full:1": "full", "docker://no-bash:1": "no-bash", "docker://broken:1": "broken"}
FLAGS = ("--containall", "--no-home", "--writable-tmpfs", "--no-privs", "--net")
VALUES = ("--workdir", "--bind", "--network", "--memory", "--memory-swap", "--cpus")


def install(folder: Path) -> None:
    """Put it there under its name."""
    program = folder / "apptainer"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {__file__} "$@"\n')
    program.chmod(0o755)


def instances() -> Path:
    return Path.home() / ".apptainer" / "instances"


def record(name: str) -> Path:
    return instances() / "app" / socket.gethostname() / getpass.getuser() / name / f"{name}.json"


def fatal(sentence: str) -> NoReturn:
    print(f"FATAL:   {sentence}", file=sys.stderr)
    sys.exit(255)


def pull(arguments: list[str]) -> None:
    target, reference = arguments
    time.sleep(0.2)
    if Path(target).exists():
        fatal(f"image file already exists: {target!r} - will not overwrite")
    if reference not in IMAGES:
        Path(target).write_text("half an image")
        fatal(f"while making image from oci registry: error fetching image {reference}: manifest unknown")
    print("INFO:    Creating SIF file...", file=sys.stderr)
    Path(target).write_text(IMAGES[reference])


def start(arguments: list[str]) -> None:
    site.main()  # which was left out, because most calls need nothing of it
    from support.namespaces import Place

    given: dict[str, list[str]] = {}
    while arguments and arguments[0].startswith("-"):
        flag = arguments.pop(0)
        if flag not in (*FLAGS, *VALUES):
            sys.exit(f'Error for command "start": unknown flag: {flag}')
        given.setdefault(flag, []).append(arguments.pop(0) if flag in VALUES else "")
    image, name = arguments
    assert {"--containall", "--no-home", "--writable-tmpfs"} <= given.keys()
    assert ("--no-privs" in given) == (os.geteuid() == 0)
    if not Path(image).is_file():
        fatal(f"could not open image {image}: failed to retrieve path for {image}")
    kind = Path(image).read_text()
    if kind == "broken":
        fatal("container creation failed: mount /proc/self/fd/3->/usr error: can't open squashfs")
    if record(name).exists():
        fatal(f"instance {name} already exists")
    record(name).parent.mkdir(parents=True)
    log = instances() / "logs" / socket.gethostname() / getpass.getuser()
    log.mkdir(parents=True, exist_ok=True)
    alone = given.get("--network") == ["none"]
    assert alone == ("--net" in given)
    work = Path(given["--workdir"][0])
    binds = {}
    for inside, outside in (("/tmp", "tmp"), ("/var/tmp", "var_tmp")):
        (work / outside).mkdir(exist_ok=True)
        binds[inside] = str(work / outside)
    for bind in given.get("--bind", []):
        source, target, *mode = bind.split(":")
        binds[target] = f"ro:{source}" if mode == ["ro"] else source
    for ending in ("out", "err"):
        (log / f"{name}.{ending}").touch()
    place = Place(record(name).parent / "etc", binds, alone=alone)
    text = {"instance": name, "pid": place.pid, "ppid": place.process.pid, "img": image, "kind": kind, "alone": alone}
    record(name).write_text(json.dumps(text))
    print("INFO:    instance started successfully", file=sys.stderr)


def found(name: str) -> dict[str, object] | None:
    """What is written of an instance that runs."""
    try:
        written: dict[str, object] = json.loads(record(name).read_text())
    except FileNotFoundError:
        return None
    if Path(f"/proc/{written['ppid']}/exe").exists():
        return written
    shutil.rmtree(record(name).parent)
    return None


def execute(arguments: list[str]) -> NoReturn:
    assert arguments.pop(0) == "--cleanenv"
    name = arguments.pop(0).removeprefix("instance://")
    instance = found(name)
    if instance is None:
        fatal(f"no instance found with name {name}")
    if instance["kind"] == "no-bash" and arguments[0] == "bash":
        fatal('"bash": executable file not found in $PATH')
    from support.namespaces import entering

    variables = {"LANG": "C", "HOME": str(Path.home()), "APPTAINER_CONTAINER": str(instance["img"])}
    argv = entering(
        int(str(instance["pid"])), bool(instance["alone"]), {**variables, "SINGULARITY_NAME": name}, arguments
    )
    os.execvp("nsenter", argv)


def stop(arguments: list[str]) -> None:
    force, wait, _, name = arguments
    assert (force, wait) == ("--force", "--timeout")
    instance = found(name)
    if instance is None:
        fatal("no instance found")
    os.kill(int(str(instance["pid"])), signal.SIGKILL)
    while found(name):
        time.sleep(0.005)


def listed() -> None:
    names = [path.stem for path in instances().glob(f"app/{socket.gethostname()}/{getpass.getuser()}/*/*.json")]
    running = [instance for name in names if (instance := found(name))]
    print(json.dumps({"instances": [{key: one[key] for key in ("instance", "pid", "img")} for one in running]}))


def main(arguments: list[str]) -> None:
    # Each variable but these would reach into a container, or is nobody's business.
    allowed = {"HOME", "PATH", "TMPDIR", "LC_CTYPE", "PWD", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "OLDPWD", "_", "SHLVL"}
    allowed |= {"SSL_CERT_FILE", "SSL_CERT_DIR"}
    assert os.environ.keys() <= allowed | {"USER", "LOGNAME", "no_proxy", "NO_PROXY", "https_proxy", "HTTPS_PROXY"} | {
        "http_proxy",
        "HTTP_PROXY",
        "DBUS_SESSION_BUS_ADDRESS",
    }, os.environ
    with (Path.home() / "calls").open("a") as log:
        log.write(" ".join(arguments) + "\n")
    if arguments[0] == "--silent":
        arguments.pop(0)
    match arguments:
        case ["pull", *rest]:
            pull(rest)
        case ["instance", "start", *rest]:
            start(rest)
        case ["instance", "stop", *rest]:
            stop(rest)
        case ["instance", "list", "--json"]:
            listed()
        case ["exec", *rest]:
            execute(rest)
        case _:
            sys.exit(f'Error: unknown command {arguments} for "apptainer"')


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    main(sys.argv[1:])
