"""Compile the modules that a sidecar runs for each message: python compile_sidecar.py SOURCE TARGET.

SOURCE is the folder with the package `rota`. TARGET gets an extension module for each name in compiled_modules.txt, in
the folders of the package. Copied over an installed package, extension modules are imported instead of the modules of
the same names. These stay there, and are imported by any interpreter that the extension modules do not fit.

The listed modules take half of the sidecar's CPU time; compiled, they save more than a third of it for messages that
are pushed one by one (bench/README.md). They differ from Python in these points:

- A class has lost the parameters of its fields' types. So no listed module defines a msgspec Struct: msgspec would
  decode its fields wrongly.
- While a coroutine or generator is suspended in an `except` or `finally` block, the error that it handles is the
  current error of its whole thread, and may stay that. Every later error would be logged as raised during its handling.
  So no listed module has an `await` or `yield` there.
- An error loses its traceback on its way through a future into a task whose coroutine is compiled, and `raise … from`
  has no effect.
- From Python 3.12 on, each error that is passed into a compiled coroutine causes a DeprecationWarning, which Python
  ignores by default.
"""

import os
import sys
import tempfile
from pathlib import Path

from mypyc.build import mypycify
from setuptools import setup

DOCKER = Path(__file__).resolve().parent
CONFIG = DOCKER.parent / "pyproject.toml"
MODULES = (DOCKER / "compiled_modules.txt").read_text().split()


def main(source: str, target: str) -> None:
    """Compile the modules; the same sources give the same bytes if PYTHONHASHSEED is set."""
    destination = Path(target).resolve()
    os.chdir(source)  # tracebacks name the files by these relative paths
    files = [f"{module.replace('.', '/')}.py" for module in MODULES]
    with tempfile.TemporaryDirectory() as scratch:
        extensions = mypycify(
            [f"--config-file={CONFIG}", f"--cache-dir={scratch}/mypy", *files],
            opt_level="3",
            debug_level="0",
            target_dir=f"{scratch}/c",
            group_name="rota_sidecar",
        )
        for extension in extensions:
            extension.extra_compile_args = [*extension.extra_compile_args, "-w"]  # C code from mypyc has many warnings
            extension.extra_link_args = ["-Wl,--strip-all", "-Wl,--build-id=none"]
        arguments = ["--quiet", "build_ext", f"--build-temp={scratch}/o", f"--build-lib={destination}"]
        setup(name="rota_sidecar", ext_modules=extensions, packages=[], py_modules=[], script_args=arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
