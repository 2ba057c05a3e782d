"""Count the instructions that the split kernel of attention issues, in its machine code. No GPU is needed.

    python benchmarks/instructions.py
    PYTHONPATH=OTHER/site-packages python benchmarks/instructions.py    # with the Triton found there

Instructions in the innermost loop over packed tokens are counted for each of the 32 lanes of a warp, and divided by the
elements of K and V that one iteration processes. An SM of A100 or H100 issues at most 4 warp instructions per cycle, so
the count limits how many elements per second an SM can process, whatever the memory does. Barriers, and loads that are
not prefetched, are counted per iteration.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from compile_kernels import Launch, attend, attend_fields, compiling

CASES = {
    "kivi, 2 bits": dict(bits=2),
    "kivi, 2 bits, left padding": dict(bits=2, padded=True),
    "kivi, 4 bits": dict(bits=4),
    "4 bits, keys per token": dict(bits=4, per="token", group=64),
    "8 bits": dict(bits=8),
    "kivi, 3 bits": dict(bits=3, page=64),
    "kivi, 16 queries": dict(bits=2, queries=16),
    "kivi before RoPE": dict(bits=2, rope="half-64"),
    "higgs": dict(bits=4, grid="d2n16", group=128),
    "higgs, 3 bits": dict(bits=6, grid="d2n64", group=128),
    "waterfill-2": dict(scheme="waterfill-2"),
    "waterfill": dict(scheme="waterfill"),
    "waterfill-3": dict(scheme="waterfill-3"),
    "waterfill-2, heads of 64": dict(scheme="waterfill-2", dim=64),
    "waterfill, heads of 64": dict(scheme="waterfill", dim=64),
    "waterfill-3, heads of 64": dict(scheme="waterfill-3", dim=64),
}
KINDS = {
    "floats": r"FADD|FMUL|FFMA|FMNMX|FSEL|FSETP|H(ADD|MUL|FMA)2|MUFU|F2FP|I2F",
    "integers": r"U?(LOP3|SHF|IADD3|IMAD|LEA|ISETP|SEL|PRMT|SGXT|PLOP3)|VIADD",
    "memory": r"LD|ST|SHFL",
    "products": r"H?G?MMA|HMMA",
}
COUNTED = {"barriers": r"BAR", "loads waited for": r"LDG\."}  # per iteration; prefetched loads are LDGSTS
REGISTERS = 65536  # per SM


def instructions(cubin: bytes) -> tuple[list[str], list[tuple[int, int]]]:
    """The instructions of a kernel, and the ranges that its loops span."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    code, labels, loops = [], {}, []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?\s*(.*?);", line):
            code.append(instruction[1])
    for i, instruction in enumerate(code):
        target = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction)
        if target and labels[target[1]] < i:
            loops.append((labels[target[1]], i + 1))
    return code, loops


def split_of(case: dict, arch: int) -> tuple[Launch, int]:
    """The launch of the split kernel of a case, and the elements of K and V that one iteration processes."""
    with compiling(arch) as launches:
        (attend_fields if "scheme" in case else attend)(**case)
    if "scheme" in case:
        (split,) = (one for one in launches if one.name == "attend_fields")
        return split, 2 * split.given["PAGES"] * split.given["K"].page * split.given["R"].dim
    given, K = launches[0].given, launches[0].given["K"]
    turns = 1 if given["TOGETHER"] >= K.planes else K.planes // given["TOGETHER"]
    return launches[0], 2 * given["ROWS"] * K.planes // turns * K.dim


def main() -> None:
    print(f"Triton {triton.__version__}")
    print("| | sm | a value | " + " | ".join((*KINDS, *COUNTED)) + " | registers | spilled | warps an SM | shared |")
    print("|---|--:|" + "--:|" * (len(KINDS) + len(COUNTED) + 5))
    for name, case in CASES.items():
        for arch in (80, 90):
            split, elements = split_of(case, arch)
            warps, (code, loops) = split.options["num_warps"], instructions(split.kernel.asm["cubin"])
            first, last = next((a, b) for a, b in loops if any("MMA" in i for i in code[a:b]))
            values = elements / (32 * warps)
            counts = [last - first] + [sum(bool(re.match(k, i)) for i in code[first:last]) for k in KINDS.values()]
            resident = REGISTERS // (-(-split.registers // 8) * 8 * 32 * warps) * warps
            waits = [str(sum(bool(re.match(kind, i)) for i in code[first:last])) for kind in COUNTED.values()]
            print(
                f"| {name} | {arch} | " + " | ".join([f"{count / values:.1f}" for count in counts] + waits),
                f"{split.registers} | {split.spilled} | {resident} | {split.shared:,} |", sep=" | ", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
