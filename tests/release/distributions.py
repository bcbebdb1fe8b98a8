"""Build the sdist and the wheel, check them, and try the wheel in clean environments: without extras and with each one.

python tests/release/distributions.py      # make dist

The environments are below build/environments. The one with torch alone is kept for the next time, and the others are
copies of it (hard links), because torch takes longest to install.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
ENVIRONMENTS = ROOT / "build" / "environments"
CONSTRAINTS = ROOT / "constraints.txt"
SMOKE = Path(__file__).with_name("smoke.py")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NO_EXTRA = "no extra"
PARALLEL = 2
SDIST_NEEDS = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "Makefile",
    "constraints.txt",
    "lock.txt",
    "tests/conftest.py",
)


def main() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    sdist, wheel = build(DIST)
    check_wheel(wheel)
    check_sdist(sdist)
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    print(f"{sdist.name} and {wheel.name} have the right content")
    base = base_environment()
    extras = [NO_EXTRA, *(extra for extra in PROJECT["optional-dependencies"] if extra != "dev")]
    with ThreadPoolExecutor(PARALLEL) as pool:
        for line in pool.map(lambda extra: try_extra(extra, base, wheel), extras):
            print(line, flush=True)


# --- build ------------------------------------------------------------------------------------------------------------


def build(to: Path, *options: str) -> list[Path]:
    """Build with `python -m build`: the sdist, and the wheel from the sdist. Returns their paths, the sdist first."""
    run(sys.executable, "-m", "build", *options, "--outdir", to, ROOT)
    return sorted(to.glob("samplewise-*"), key=lambda path: path.suffix == ".whl")


def check_wheel(path: Path) -> None:
    """Check that the wheel has the files of src/samplewise, the metadata and nothing else."""
    with zipfile.ZipFile(path) as wheel:
        found = set(wheel.namelist())
        info = f"samplewise-{PROJECT['version']}.dist-info"
        metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
        entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    records = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    expected = package_files() | records
    assert found == expected, f"missing: {sorted(expected - found)}; not wanted: {sorted(found - expected)}"
    assert "samplewise/py.typed" in found
    assert not [name for name in found if re.search(r"(^|/)(tests?|conftest\.py|__pycache__|\..*)(/|$)|\.pyc$", name)]
    assert metadata["Version"] == PROJECT["version"] and metadata["License-Expression"] == "MIT"
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert len(needed) == 1 and needed[0].startswith("torch"), needed
    assert "samplewise = samplewise.cli.main:main" in entry_points


def package_files() -> set[str]:
    """Files of the package in the source tree, without caches."""
    files = (path.relative_to(ROOT / "src") for path in (ROOT / "src" / "samplewise").rglob("*") if path.is_file())
    return {path.as_posix() for path in files if "__pycache__" not in path.parts}


def check_sdist(path: Path) -> None:
    """Check that the sdist has the package and what `make test` needs, and no caches."""
    with tarfile.open(path) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    missing = {*SDIST_NEEDS, *(f"src/{name}" for name in package_files())} - found
    assert not missing, f"missing: {sorted(missing)}"
    assert not [name for name in found if "__pycache__" in name or re.match(r"\.(venv|mypy|ruff|pytest)", name)]


# --- environments -----------------------------------------------------------------------------------------------------


def base_environment() -> Path:
    """Virtual environment with torch and its dependencies; made again if constraints.txt or Python has changed."""
    key = hashlib.sha256(CONSTRAINTS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    base = ENVIRONMENTS / f"torch-{key}"
    if not (base / "complete").exists():
        shutil.rmtree(base, ignore_errors=True)
        make_environment(base)
        pip_install(base, *PROJECT["dependencies"])
        (base / "complete").touch()
    return base


def try_extra(extra: str, base: Path, wheel: Path) -> str:
    """Install the wheel with an extra into a new environment and run the smoke test there; returns the result."""
    started = time.monotonic()
    place = ENVIRONMENTS / extra.replace(" ", "-")
    shutil.rmtree(place, ignore_errors=True)
    make_environment(place, "--without-pip")  # pip is copied, too
    shutil.copytree(site_packages(base), site_packages(place), copy_function=os.link, dirs_exist_ok=True)
    suffix, arguments = ("", []) if extra == NO_EXTRA else (f"[{extra}]", [extra])
    pip_install(place, f"{wheel}{suffix}")
    run(python(place), "-m", "pip", "check", "--disable-pip-version-check")
    with tempfile.TemporaryDirectory() as empty:
        output = run(python(place), "-I", SMOKE, PROJECT["version"], *arguments, cwd=empty)
    shutil.rmtree(place)
    lines = "\n".join(f"    {line}" for line in output.splitlines())
    return f"{extra}: ok, {time.monotonic() - started:.0f} s\n{lines}"


def make_environment(place: Path, *options: str) -> None:
    run(sys.executable, "-m", "venv", *options, place)


def python(environment: Path) -> Path:
    return environment / ("Scripts" if os.name == "nt" else "bin") / "python"


def site_packages(environment: Path) -> Path:
    return Path(run(python(environment), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


def pip_install(environment: Path, *what: str) -> None:
    options = ["-q", "--disable-pip-version-check", "-c", CONSTRAINTS]
    run(python(environment), "-m", "pip", "install", *options, *what)


def run(*command: str | Path, cwd: Path | str | None = None) -> str:
    """Run a command and return its output; a failure raises with both streams."""
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=cwd)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


if __name__ == "__main__":
    main()
