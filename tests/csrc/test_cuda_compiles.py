"""What nvcc makes of `csrc/cuda` for sm_80 and sm_90: registers, spills, shared memory, and whether
rows are read 16 bytes at a time. Needs nvcc, no GPU and no torch built for CUDA."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc" / "cuda"
SOURCES = sorted(CSRC.glob("*.cu"))
ARCHITECTURES = ("80", "90")
NVCC = shutil.which("nvcc")
TORCH_DEFINES = ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS")
# Of a kernel's mangled name: op, element type, and threads, vectors and width of its shape.
ROW_KERNEL = re.compile(
    r"\d(?P<op>[a-z]+(?:_backward)?)_kernelI(?P<type>f|13__nv_bfloat16)"
    r"NS0_5ShapeILi(?P<threads>\d+)ELi(?P<vectors>\d+)ELi(?P<width>\d+)EEE"
)
REPORT = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for 'sm_(?P<arch>\d+)'"
    r".*?(?P<spill>\d+) bytes spill stores"
    r".*?Used (?P<registers>\d+) registers(?:[^\n]*?(?P<shared>\d+) bytes smem)?",
    re.S,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NVCC is None, reason="nvcc is not there"),
]


def cuobjdump():
    """That of the toolkit, or the one that triton brings."""
    beside = Path(NVCC).resolve().with_name("cuobjdump")
    if beside.exists():
        return str(beside)
    found = importlib.util.find_spec("triton")
    inside = found and Path(found.origin).parent / "backends/nvidia/bin/cuobjdump"
    return str(inside) if inside and inside.exists() else shutil.which("cuobjdump")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Object files by name, and ptxas' report on every kernel."""
    folder = tmp_path_factory.mktemp("cuda")
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHITECTURES]
    common = [NVCC, "-std=c++17", "-O3", "-DSTARS_FEW_KERNELS", "-Xptxas", "-v", *targets]
    # As torch.utils.cpp_extension compiles: no implicit conversion of 16-bit types.
    common += [f"-D__CUDA_NO_{name}__" for name in TORCH_DEFINES]
    waiting, running, reports = list(SOURCES), [], []
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            source = waiting.pop(0)
            command = [*common, "-c", str(source), "-o", str(folder / f"{source.stem}.o")]
            running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        process = running.pop(0)
        _, text = process.communicate()
        assert process.returncode == 0, text
        reports += [match.groupdict() for match in REPORT.finditer(text)]
    return {source.stem: folder / f"{source.stem}.o" for source in SOURCES}, reports


def row_kernels(reports):
    for report in reports:
        shape = ROW_KERNEL.search(report["name"])
        if shape:
            numbers = {key: int(shape[key]) for key in ("threads", "vectors", "width")}
            yield report | numbers | {"op": shape["op"], "type": shape["type"]}


def test_every_kernel_is_compiled_for_every_architecture(compiled):
    _, reports = compiled
    by_arch = [{r["name"] for r in reports if r["arch"] == arch} for arch in ARCHITECTURES]
    assert by_arch[0] == by_arch[1]
    ops = {kernel["op"] for kernel in row_kernels(reports)}
    assert ops == {"norm", "norm_backward", "sandwich", "sandwich_backward"}
    assert sum("fold_kernel" in name for name in by_arch[0]) == 1


def test_registers_and_shared_memory_leave_room_for_the_blocks_that_are_launched(compiled):
    _, reports = compiled
    assert all(int(report["registers"]) <= 255 for report in reports)
    assert all(int(report["shared"] or 0) <= 48 << 10 for report in reports)
    for kernel in row_kernels(reports):
        threads = max(kernel["threads"], 128)
        # 16 warps an SM at the least.
        blocks = 512 // threads
        assert int(kernel["registers"]) * threads * blocks <= 65536, kernel
        assert int(kernel["shared"] or 0) * blocks <= 100 << 10, kernel


def test_rows_of_up_to_4096_stay_in_registers(compiled):
    """Two registers aside, that the forward of a sandwich lacks on sm_90. In rows of 8192 the
    backward kernels spill more: their operands alone are half an SM."""
    _, reports = compiled
    clean = set()
    for kernel in row_kernels(reports):
        width = kernel["threads"] * kernel["vectors"] * kernel["width"]
        spill = int(kernel["spill"])
        assert spill <= (8 if kernel["op"] == "sandwich" else 256 if width == 8192 else 0), kernel
        if spill == 0:
            clean.add((kernel["op"], width))
    for op in ("norm", "norm_backward", "sandwich_backward"):
        assert {(op, width) for width in (512, 1024, 2048, 4096)} <= clean


@pytest.mark.parametrize("op", ["norm", "norm_backward", "sandwich", "sandwich_backward"])
def test_rows_are_read_16_bytes_at_a_time(compiled, op):
    tool = cuobjdump()
    if tool is None:
        pytest.skip("cuobjdump is not there")
    objects, _ = compiled
    operands = {"norm": 1, "norm_backward": 2, "sandwich": 2, "sandwich_backward": 4}[op]
    checked = 0
    command = [tool, "-sass", "-arch", "sm_90", str(objects[op])]
    sass = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for function in sass.split("Function : ")[1:]:
        shape = ROW_KERNEL.search(function.split("\n", 1)[0])
        if shape is None or shape["vectors"] == "0":
            continue
        checked += 1
        loads = re.findall(r"\bLDG\.E\.128", function)
        stores = re.findall(r"\bSTG\.E\.128", function)
        # A primal and a tangent of each operand and vector; stores of two vectors may be merged.
        assert len(loads) >= 2 * operands * int(shape["vectors"])
        assert len(stores) >= 2
        assert not re.findall(r"\bSTG\.E\.U16", function)
    assert checked >= 14
