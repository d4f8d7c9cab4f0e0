"""``nox`` lints, type-checks and tests; ``nox -s demo`` shows what the fixes do. See README.md.

Two environments of about 2 GB are built once under .nox/: one for each set of packages that verl's releases need.
The releases themselves are pure Python and lie in folders of their own.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["lint", "unit", "stock"]

HERE = Path(__file__).parent
CACHE = HERE / ".nox"
TEST_TOOLS = ["hypothesis>=6", "pytest>=8", "pytest-timeout>=2", "pytest-xdist>=3.6"]
TORCH = "torch==2.13.0"
"""Installed first and alone: a range in another package must not fetch a second build of 3 GB."""

# What importing every engine of verl needs on CPU, and what the tests need.
COMMON = [
    "accelerate",
    "cachetools",
    "click>=8.1",
    "codetiming",
    "datasets<5",
    "einops",
    "fastapi",
    "hydra-core",
    "matplotlib",
    "mbridge==0.15.1",
    "megatron-core==0.16.1",
    "peft",
    "pillow",
    "psutil",
    "pyarrow<21",
    "pylatexenc",
    "ray[default]==2.60.*",
    "rich>=13",
    "tensordict==0.10.*",
    "torchdata",
    "uvicorn",
    "wrapt>=1.16",
    *TEST_TOOLS,
]


@dataclass(frozen=True)
class Environment:
    """A set of packages that some releases of verl run with."""

    name: str
    packages: tuple[str, ...]
    releases: tuple[str, ...]


OLD = Environment("old", ("numpy<2", "transformers>=4.57,<4.58", *COMMON), ("0.7.0", "0.7.1", "0.8.0"))
NEW = Environment(
    "new",
    ("numpy>=2", "transformers>=5.9,<5.11", "TransferQueue==0.1.11", "msgspec", "pyzmq", "nvtx", *COMMON),
    ("0.9.0", "0.9.1"),
)
RAY_TESTS = dict.fromkeys(("0.8.0", "0.9.1"), (["tests/ray"],))
"""Four minutes each: one release without verl's plugin loader and one with it. The others have their own session."""

MEGATRON_CORES = ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
NEWEST = "0.9.1"
"""The release of verl that runs with all of them."""

ENVIRONMENT_OF = {release: environment for environment in (OLD, NEW) for release in environment.releases}


def prepare(session: nox.Session, environment: Environment) -> Path:
    """Build an environment, once for each list of packages, put this checkout in it, and return its Python."""
    folder = CACHE / f"verl-{environment.name}"
    python = folder / "bin" / "python"
    stamp = folder / "packages"
    wanted = hashlib.sha256("\n".join((TORCH, *environment.packages)).encode()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        session.run("python3.11", "-m", "venv", str(folder), external=True)
        session.run(str(python), "-m", "pip", "install", "--quiet", TORCH, external=True)
        session.run(str(python), "-m", "pip", "install", "--quiet", *environment.packages, external=True)
        stamp.write_text(wanted)
    session.run(
        str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(HERE), external=True
    )
    return python


def fetch(session: nox.Session, python: Path, release: str, package: str = "verl") -> Path:
    """Unpack a release of verl or megatron-core into a folder of its own, once, and return that folder."""
    folder = CACHE / ("releases" if package == "verl" else package) / release
    if not folder.is_dir():
        parts = folder.with_name(f"{release}.part")
        shutil.rmtree(parts, ignore_errors=True)
        install = ["install", "--quiet", "--no-deps", "--target", str(parts), f"{package}=={release}"]
        if package == "megatron-core":  # from 0.17 on it asks for Python 3.12; what we run of it does not
            install += ["--only-binary", ":all:", "--python-version", "3.12", "--ignore-requires-python"]
            install += [f"--platform=manylinux_2_{glibc}_{platform.machine()}" for glibc in (28, 24, 17)]
        session.run(str(python), "-m", "pip", *install, external=True)
        parts.rename(folder)
    return folder


def search_path(*folders: Path) -> str:
    """A PYTHONPATH."""
    return os.pathsep.join(map(str, folders))


def other_interpreters() -> list[str]:
    """Python 3.10, 3.12 and 3.13, as far as they are found and really start."""
    found = []
    for version in ("3.10", "3.12", "3.13"):
        for candidate in (f"python{version}", *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))):
            try:
                subprocess.run([candidate, "-c", "import ensurepip"], check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                continue
            found.append(candidate)
            break
    return found


@nox.session(python="3.11")
def lint(session: nox.Session) -> None:
    """ruff and mypy --strict."""
    session.install("-e", ".", "mypy>=1.10", "ruff>=0.8", "nox")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session(python=["3.11", *other_interpreters()])
def unit(session: nox.Session) -> None:
    """What needs neither verl nor torch, on every Python that is there."""
    session.install(".", *TEST_TOOLS)
    session.run("pytest", "tests/unit", *session.posargs)


def run_tests(session: nox.Session, release: str, *runs: list[str], core: str | None = None) -> None:
    """pytest, once for each list of arguments, with a release of verl, and with another megatron-core."""
    python = prepare(session, ENVIRONMENT_OF[release])
    folders = [fetch(session, python, core, "megatron-core")] if core else []
    path = {
        "PYTHONPATH": search_path(*folders, fetch(session, python, release)),
        "OMP_NUM_THREADS": "1",
        "VERL_GRADIENTS": str(CACHE / "gradients"),  # where releases leave theirs for each other
    }
    for arguments in [session.posargs] if session.posargs else runs:
        session.run(str(python), "-m", "pytest", *arguments, env=path, external=True)


@nox.session(venv_backend="none")
@nox.parametrize("release", list(ENVIRONMENT_OF))
def stock(session: nox.Session, release: str) -> None:
    """What runs a real release of verl: two files at a time, clusters one by one."""
    two_at_a_time = ["-n", "2", "--dist", "loadfile", "tests/tensors", "tests/stock", "tests/megatron"]
    run_tests(session, release, two_at_a_time, *RAY_TESTS.get(release, ()))


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Stock verl 0.8.0 on this machine's CPU, without and with the fixes."""
    python = prepare(session, OLD)
    path = {"PYTHONPATH": str(fetch(session, python, "0.8.0"))}
    session.run(str(python), "-m", "verl_fixes", "demo", *session.posargs, env=path, external=True)


@nox.session(venv_backend="none")
@nox.parametrize("release", [release for release in ENVIRONMENT_OF if release not in RAY_TESTS])
def ray(session: nox.Session, release: str) -> None:
    """The Ray tests on the releases that ``stock`` leaves out. Not part of the default run."""
    run_tests(session, release, ["tests/ray"])


@nox.session(venv_backend="none")
@nox.parametrize("release", list(ENVIRONMENT_OF))
def layouts(session: nox.Session, release: str) -> None:
    """Gradients in layouts of four processes. Not part of the default run."""
    run_tests(session, release, ["tests/megatron", "-m", "long"])


@nox.session(venv_backend="none")
@nox.parametrize("core", MEGATRON_CORES)
def megatron(session: nox.Session, core: str) -> None:
    """The Megatron tests with other releases of megatron-core. Not part of the default run."""
    run_tests(session, NEWEST, ["tests/megatron"], core=core)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Measure what the docs show, and write it there."""
    python = prepare(session, NEW)
    files = []
    for core in MEGATRON_CORES:
        folders = [fetch(session, python, core, "megatron-core"), fetch(session, python, NEWEST)]
        files.append(Path(session.create_tmp()) / f"{core}.json")
        path = {"PYTHONPATH": search_path(*folders, HERE), "OMP_NUM_THREADS": "1"}
        measure = ["-m", "benchmarks.megatron_core", "measure", str(files[-1])]
        session.run(str(python), *measure, env=path, external=True)
    path = {"PYTHONPATH": str(HERE)}
    session.run(str(python), "-m", "benchmarks.megatron_core", "render", *map(str, files), env=path, external=True)
