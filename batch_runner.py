"""The batch runner's command and class in a checkout: `python batch_runner.py --dataset_file=… --batch_size=… …`.

It is `gristmill run`, with the same flags; `python batch_runner.py --help` lists them. `BatchRunner` is for scripts.
"""

import os
import sys
from pathlib import Path
from typing import Any

SOURCE = str(Path(__file__).resolve().parent / "src")
sys.path.insert(0, SOURCE)
# Worker processes import the same package, also where it is not installed.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (SOURCE, os.environ.get("PYTHONPATH"))))

from gristmill.cli.main import main  # noqa: E402

__all__ = ["BatchRunner"]  # noqa: F822 - made when asked for, so that --help need not wait for it


def __getattr__(name: str) -> Any:
    if name == "BatchRunner":
        from gristmill.cli.batch import BatchRunner

        return BatchRunner
    raise AttributeError(f"module 'batch_runner' has no attribute {name!r}")


if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
