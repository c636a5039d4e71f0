"""How the package builds and installs, with the compiled kernels and without."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import warnings
import zipfile
from pathlib import Path

import pytest

from stars_fast.ops import extension, library

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
PARTS = ("csrc", "stars_fast", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")


@pytest.fixture
def tree(tmp_path):
    """A copy of the sources in which nothing was built."""
    skip = shutil.ignore_patterns("*.so", "__pycache__", "build", "*.egg-info")
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(
            ROOT / part,
            tmp_path / "tree" / part,
            **({"ignore": skip} if copy is shutil.copytree else {}),
        )
    return tmp_path / "tree"


def build(tree, *command, **environment):
    """`python setup.py <command>`, a wheel by default; pip runs the same file."""
    env = {k: v for k, v in os.environ.items() if k not in ("STARS_FAST_BUILD", "CXX")}
    return subprocess.run(
        [sys.executable, "setup.py", *(command or ["bdist_wheel"])],
        cwd=tree,
        env={**env, **environment},
        capture_output=True,
        text=True,
    )


def installed(tree, tmp_path):
    """The Python of a fresh environment with the wheel in it, and torch from this one."""
    (wheel,) = (tree / "dist").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return wheel, site, python


def run(python, code, cwd):
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "STARS_FAST_BACKEND")}
    return subprocess.run([python, "-c", code], cwd=cwd, env=env, capture_output=True, text=True)


USE = """
import torch, stars_fast
from stars_fast import ops
from stars_fast.ops import extension
x = torch.ones(2, 3, 8)
print(ops.rms_norm(x, None, 1e-5).shape, extension.load(), stars_fast.__file__)
"""


def test_wheel_with_kernels_loads_in_a_fresh_environment(tree, tmp_path):
    compiler, called = tmp_path / "compiler", tmp_path / "called"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {called}\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    done = build(tree, STARS_FAST_BUILD="cpu", CXX=str(compiler))
    assert done.returncode == 0, done.stderr
    # Not once more for the wheel
    assert len(re.findall(r"-c \S*/ops\.cpp", called.read_text())) == 1
    wheel, site, python = installed(tree, tmp_path)
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    used = run(python, USE, tmp_path)
    assert used.returncode == 0, used.stderr
    assert "True" in used.stdout
    assert str(site) in used.stdout
    assert "Warning" not in used.stderr


def test_wheel_without_kernels_works_and_says_so_once(tree, tmp_path):
    done = build(tree, STARS_FAST_BUILD="none")
    assert done.returncode == 0, done.stderr
    wheel, _, python = installed(tree, tmp_path)
    assert wheel.name.endswith("py3-none-any.whl")
    used = run(python, USE, tmp_path)
    assert used.returncode == 0, used.stderr
    assert "False" in used.stdout
    assert used.stderr.count("compiled kernels are not built") == 1


def left_out(done):
    """The line on what is left out: exactly one."""
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("stars_fast:")]
    (line,) = lines
    return line


def is_pure(tree):
    (wheel,) = (tree / "dist").glob("*.whl")
    return wheel.name.endswith("py3-none-any.whl")


@pytest.mark.parametrize("compiler", ["false", "/nowhere/c++", "broken"])
def test_without_a_compiler_the_build_is_pure_python_and_says_so(tree, tmp_path, compiler):
    if compiler == "broken":  # compiles, can't link
        compiler = tmp_path / "compiler"
        compiler.write_text(
            "#!/bin/sh\n"
            'case " $* " in *" -shared "*) echo "ld: cannot find -lc10" >&2; exit 1;; esac\n'
            'exec c++ "$@"\n'
        )
        compiler.chmod(0o755)
    done = build(tree, CXX=str(compiler))
    assert "built without compiled kernels: " in left_out(done)
    assert is_pure(tree)


def test_kernels_that_fail_after_the_trial_are_left_out_as_well(tree):
    (tree / "csrc" / "cpu" / "dispatch.cpp").write_text("#error not on this machine\n")
    (tree / "csrc" / "cpu" / "avx2.cpp").unlink()
    (tree / "csrc" / "cpu" / "avx512.cpp").unlink()
    (tree / "csrc" / "cpu" / "baseline.cpp").unlink()
    (tree / "csrc" / "cpu" / "ops.cpp").unlink()
    assert "built without compiled kernels: " in left_out(build(tree))
    assert is_pure(tree)
    asked = build(tree, STARS_FAST_BUILD="cpu")
    assert asked.returncode != 0
    assert "not on this machine" in asked.stdout + asked.stderr


def test_cuda_is_not_built_unasked(tree, tmp_path):
    """Not even where torch is built for CUDA and an nvcc is there."""
    toolkit = tmp_path / "toolkit"
    (toolkit / "bin").mkdir(parents=True)
    nvcc = toolkit / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\ntouch {tmp_path}/called\nexit 1\n")
    nvcc.chmod(0o755)
    for source in (tree / "csrc" / "cpu").glob("*.cpp"):
        source.unlink()
    (tree / "csrc" / "cpu" / "empty.cpp").write_text("void nothing() {}\n")
    path = f"{toolkit}/bin{os.pathsep}{os.environ['PATH']}"
    done = build(tree, CUDA_HOME=str(toolkit), PATH=path)
    assert done.returncode == 0, done.stderr
    assert not is_pure(tree)
    assert not (tmp_path / "called").exists()
    asked = build(tree, CUDA_HOME=str(toolkit), PATH=path, STARS_FAST_BUILD="cuda")
    assert asked.returncode != 0
    assert "STARS_FAST_BUILD=cuda can't be built: " in asked.stderr


def test_what_an_earlier_build_left_is_not_taken_for_new(tree, tmp_path):
    """Without ninja, whose rules know headers: an older header's kernels, and modules that are gone
    since."""
    for source in (tree / "csrc" / "cpu").glob("*.cpp"):
        source.unlink()
    header = tree / "csrc" / "cpu" / "said.h"
    header.write_text('#define SAID "said before"\n')
    text = '#include "said.h"\n__attribute__((visibility("default"))) const char* said = SAID;\n'
    (tree / "csrc" / "cpu" / "said.cpp").write_text(text)
    gone = tree / "stars_fast" / "gone.py"
    gone.write_text("")
    (tmp_path / "ninja").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "ninja").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"

    def built():
        """The names in the wheel, and the bytes of its kernels and of those in the tree."""
        for command in (["bdist_wheel"], ["build_ext", "--inplace"]):
            done = build(tree, *command, PATH=path, STARS_FAST_BUILD="cpu")
            assert done.returncode == 0, done.stderr
        (wheel,) = (tree / "dist").glob("*.whl")
        (here,) = (tree / "stars_fast").glob("_native*")
        with zipfile.ZipFile(wheel) as archive:
            (inside,) = (name for name in archive.namelist() if "_native" in name)
            return archive.namelist(), archive.read(inside), here.read_bytes()

    assert "stars_fast/gone.py" in built()[0]
    header.write_text('#define SAID "said after"\n')
    old = header.stat().st_mtime - 60  # as of a clone that is older than the build
    os.utime(header, (old, old))
    gone.unlink()
    names, wheel, here = built()
    assert "stars_fast/gone.py" not in names
    assert b"said after" in wheel
    assert b"said after" in here


@pytest.mark.parametrize("before", [["build"], ["build_py"], ["build", "--build-lib", "."]])
def test_a_wheel_holds_what_the_same_command_has_built(tree, before):
    """Whether it was built there or lies in the sources."""
    done = build(tree, *before, "bdist_wheel", STARS_FAST_BUILD="none")
    assert done.returncode == 0, done.stderr
    assert (tree / "stars_fast" / "__init__.py").exists()
    (wheel,) = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = (tree / "stars_fast").rglob("*.py")
    assert names >= {str(each.relative_to(tree)) for each in sources}


def test_without_torch_the_build_is_pure_python_and_says_so(tree, tmp_path):
    # As in an isolated build: a torch that can't be imported.
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "torch.py").write_text("raise ImportError('not here')")
    done = build(tree, PYTHONPATH=str(tmp_path / "hidden"))
    assert "torch is not in the build environment" in left_out(done)
    assert is_pure(tree)
    asked = build(tree, PYTHONPATH=str(tmp_path / "hidden"), STARS_FAST_BUILD="cpu")
    assert asked.returncode != 0
    assert "STARS_FAST_BUILD=cpu can't be built: torch is not" in asked.stderr


def test_a_build_that_is_asked_for_and_impossible_is_an_error(tree):
    done = build(tree, STARS_FAST_BUILD="cpu", CXX="false")
    assert done.returncode != 0
    assert "STARS_FAST_BUILD=cpu can't be built: " in done.stderr
    assert "'false'" in done.stderr.splitlines()[-1]
    trial = tree / "csrc" / "trial" / "cpu" / "trial.cpp"
    trial.write_text("#include <not/there.h>\n")
    done = build(tree, STARS_FAST_BUILD="cpu")
    assert done.returncode != 0
    assert re.search(r"can't be built: .*trial\.cpp:1.*error: .*not/there\.h", done.stderr)
    done = build(tree, STARS_FAST_BUILD="fpga")
    assert done.returncode != 0
    assert "expected none, cpu or cuda, got 'fpga'" in done.stderr


def test_a_torch_older_than_the_abi_builds_no_kernels(tree):
    script = tree / "setup.py"
    script.write_text(script.read_text().replace("TORCH = (2, 11)", "TORCH = (9, 0)"))
    assert "torch: expected 9.0 or newer, whose stable ABI" in left_out(build(tree))
    asked = build(tree, STARS_FAST_BUILD="cpu")
    assert asked.returncode != 0
    assert "STARS_FAST_BUILD=cpu can't be built: torch: expected 9.0" in asked.stderr


WITHOUT_WHEELS = """
import sys, setuptools
from setuptools.errors import BaseError
plain = setuptools.Distribution.get_command_class
def older(self, command):
    if command == "bdist_wheel" and command not in self.cmdclass:
        raise BaseError("invalid command 'bdist_wheel'")
    return plain(self, command)
setuptools.Distribution.get_command_class = older
sys.argv = ["setup.py", "-q", sys.argv[1]]
exec(compile(open("setup.py").read(), "setup.py", "exec"))
"""


def test_a_setuptools_that_makes_no_wheels_is_said_in_one_line(tree):
    def older(command):
        return subprocess.run(
            [sys.executable, "-c", WITHOUT_WHEELS, command],
            cwd=tree,
            env={**os.environ, "STARS_FAST_BUILD": "none"},
            capture_output=True,
            text=True,
        )

    done = older("bdist_wheel")
    assert done.returncode != 0
    assert done.stderr.startswith("stars_fast: setuptools ")
    assert done.stderr.endswith('pip install "setuptools>=77"\n')
    assert older("egg_info").returncode == 0  # what pip asks before it installs the package wheel


def test_the_metadata_name_the_licence(tree):
    done = build(tree, "egg_info", STARS_FAST_BUILD="none")
    assert done.returncode == 0, done.stderr
    (folder,) = tree.glob("*.egg-info")
    text = (folder / "PKG-INFO").read_text()
    assert re.search(r"^License(-Expression)?: Apache-2\.0$", text, re.MULTILINE)
    assert "License-File: LICENSE\n" in text


def test_the_source_archive_has_the_sources(tree):
    done = build(tree, "sdist", STARS_FAST_BUILD="none")
    assert done.returncode == 0, done.stderr
    (archive,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.split("/", 1)[1] for name in files.getnames() if "/" in name}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    assert sources <= names


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(extension, "FOLDER", tmp_path)
    extension.load.cache_clear()
    yield tmp_path
    extension.load.cache_clear()


def test_an_absent_extension_is_said_once(folder, monkeypatch):
    assert extension.load() is False
    monkeypatch.setattr(library, "_loaded", set())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.warns(UserWarning, match=f"not built in {re.escape(str(folder))}"):
        library._load("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        library._load("cpu")


def test_an_extension_that_does_not_load_is_an_error(folder, monkeypatch):
    file = folder / "_native.torch2.99.so"
    file.write_bytes(b"not a library")
    with pytest.raises(ImportError, match=r"torch2\.99\.so does not load with torch 2\..*>= 2\.99"):
        extension.load()
    monkeypatch.setattr(library, "_loaded", set())
    for _ in range(2):  # not plain PyTorch in silence when it is called again
        with pytest.raises(ImportError, match="does not load"):
            library.has("cpp", "cpu")
