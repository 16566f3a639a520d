"""`make release-check`: builds all parts of a release twice, checks them, and moves them to dist/ if all are right."""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from ground.report import Missing
from release import before, boms, charts, images, packages, plugin, versions
from release.work import ROOT, CheckFailedError, SkippedError, UsageError, Work, prepare, sha256

CHECKS: dict[str, Callable[[Work], str]] = {
    "versions": versions.check_versions,
    "compatible": before.check_compatibility,
    "wheel": packages.build,
    "installed": packages.install,
    "extras": packages.install_extras,
    "plugin": plugin.build,
    "chart": charts.package,
    "rendered": charts.render,
    "licences": boms.list_licences,
    "materials": boms.write_all,
    "images": images.build,
}
SUMS = "SHA256SUMS"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.add_argument(
        "--without", action="append", default=[], choices=CHECKS, help="leave this out; may be repeated"
    )
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="the folder to make (default: dist/)")
    options = parser.parse_args(arguments)
    try:
        _remove_previous_release(options.into)
        with tempfile.TemporaryDirectory(prefix="rota-release-") as scratch:
            work, origin = prepare(Path(scratch))
            print(f"Rota {work.version} of {origin}", flush=True)
            if not _run_checks(work, options.without):
                print("This cannot be released.", file=sys.stderr)
                return 1
            _move_into_place(work, options.into)
    except (UsageError, Missing) as error:
        print(f"release: {error}.", file=sys.stderr)
        return 2
    return 0


def _run_checks(work: Work, without: list[str]) -> bool:
    """Run every check, also after a failed one, and print a line for each."""
    all_passed = True
    for name, check in CHECKS.items():
        try:
            sign, result = ("LEFT OUT", "as you wished") if name in without else ("ok", check(work))
        except SkippedError as skipped:
            sign, result = "LEFT OUT", str(skipped)
        except (CheckFailedError, Missing) as failure:
            all_passed = False
            sign, result = "FAILED", str(failure)
        print(f"{name:12}{sign:10}{result}", flush=True)
    return all_passed


def _remove_previous_release(into: Path) -> None:
    """Remove an older release from the folder; fail if the folder has a file that no checksum of a release names."""
    if not into.exists():
        return
    if not into.is_dir():
        raise UsageError(f"{into} is no folder; name another with --into")
    sums = into / SUMS
    ours = {line.split()[1] for line in sums.read_text().splitlines()} | {SUMS} if sums.is_file() else set()
    strange = sorted({path.name for path in into.iterdir()} - ours)
    if strange:
        raise UsageError(
            f"{into} holds {strange[0]}, which no release made; move it away, or name another folder with --into"
        )
    shutil.rmtree(into)


def _move_into_place(work: Work, into: Path) -> None:
    """Move the files to the target folder, with their checksums, and list them."""
    files = sorted(work.into.iterdir())
    sums = {path.name: sha256(path) for path in files}
    (work.into / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    into.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(work.into, into)
    print(f"\n{into}, all of it in {SUMS}:")
    for name, digest in sums.items():
        print(f"  {(into / name).stat().st_size:>11,}  {name:44} {digest}")


if __name__ == "__main__":
    sys.exit(main())
