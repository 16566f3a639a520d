"""`make release-check`: make all of a release twice, look into it, and put it into dist/ if everything is right."""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from ground.report import Missing
from release import before, boms, charts, images, packages, plugin, versions
from release.work import ROOT, Failed, InvalidSpecError, LeftOut, Work, begun, sha256

CHECKS: dict[str, Callable[[Work], str]] = {
    "versions": versions.agree,
    "compatible": before.compatible,
    "wheel": packages.build,
    "installed": packages.installs,
    "extras": packages.extras,
    "plugin": plugin.build,
    "chart": charts.package,
    "rendered": charts.renders,
    "licences": boms.listed,
    "materials": boms.written,
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
    asked = parser.parse_args(arguments)
    try:
        _may_be_replaced(asked.into)
        with tempfile.TemporaryDirectory(prefix="rota-release-") as scratch:
            work, told = begun(Path(scratch))
            print(f"Rota {work.version} of {told}", flush=True)
            if not _all_right(work, asked.without):
                print("This cannot be released.", file=sys.stderr)
                return 1
            _deliver(work, asked.into)
    except (InvalidSpecError, Missing) as mistake:
        print(f"release: {mistake}.", file=sys.stderr)
        return 2
    return 0


def _all_right(work: Work, without: list[str]) -> bool:
    """Make every check, also after one that failed, and tell of each in a line."""
    right = True
    for name, check in CHECKS.items():
        try:
            sign, told = ("LEFT OUT", "as you wished") if name in without else ("ok", check(work))
        except LeftOut as left:
            sign, told = "LEFT OUT", str(left)
        except (Failed, Missing) as failed:
            right, sign, told = False, "FAILED", str(failed)
        print(f"{name:12}{sign:10}{told}", flush=True)
    return right


def _may_be_replaced(into: Path) -> None:
    """See to it that nothing is lost but an older release: everything in one is named in its sums."""
    if not into.exists():
        return
    if not into.is_dir():
        raise InvalidSpecError(f"{into} is no folder; name another with --into")
    sums = into / SUMS
    ours = {line.split()[1] for line in sums.read_text().splitlines()} | {SUMS} if sums.is_file() else set()
    strange = sorted({path.name for path in into.iterdir()} - ours)
    if strange:
        raise InvalidSpecError(
            f"{into} holds {strange[0]}, which no release made; move it away, or name another folder with --into"
        )
    shutil.rmtree(into)


def _deliver(work: Work, into: Path) -> None:
    """Move what was made to where it is looked for, and show it."""
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
