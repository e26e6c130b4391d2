"""The batch runner's command and class in a checkout: `python batch_runner.py --dataset_file=… --batch_size=… …`.

It is `gristmill run`, with the same flags; `python batch_runner.py --help` lists them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from gristmill.cli.batch import BatchRunner

from gristmill.cli.main import main

__all__ = ["BatchRunner"]

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
