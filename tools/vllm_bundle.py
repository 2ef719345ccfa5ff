"""Pack vLLM 0.26.0 for a GPU machine without network: CUDA 13, x86_64, Python 3.12, torch 2.11, transformers.

    python tools/vllm_bundle.py --work build/vllm-bundle --out build/vllm-bundle/out

The machine's own torch, triton, transformers, numpy and their dependencies are used. The bundle holds vLLM, its other
dependencies as far as `LLM.generate()`, `vllm serve` and `vllm bench serve` need them, and stubs of the grammar libraries. `OUT` gets part.000, part.001, …
and first/, which holds unpack.sh, the list of files and a zstd decoder. Copy everything to one folder of the machine:

    sh first/unpack.sh FOLDER /tmp/vllm        writes /tmp/vllm/site and /tmp/vllm/python
    /tmp/vllm/python -c 'import vllm'

The files of FlashAttention 2 are the last ones. A Hopper GPU uses FlashAttention 3, so the last parts can be left out:
unpack.sh skips files whose parts are missing.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

VLLM = "vllm==0.26.0"
ZSTD = "zstandard==0.25.0"
PACKAGES = """
    aiohappyeyeballs==2.7.1 aiohttp==3.14.5 aiosignal==1.4.0 annotated-doc==0.0.6 annotated-types==0.8.0 anyio==4.16.0
    astor==0.8.1 attrs==26.1.0 blake3==1.0.11 cachetools==8.0.0 cbor2==6.2.1 certifi==2026.10.18
    charset-normalizer==3.5.2 click==8.5.1 cloudpickle==3.1.2 compressed-tensors==0.17.0 depyf==0.20.0 dill==0.4.1 einops==0.8.2
    fastapi==0.136.3 frozenlist==1.8.0 googleapis-common-protos==1.76.0 h11==0.16.0 httpcore==1.0.9 httpcore2==2.16.0
    httptools==0.9.0 httpx==0.28.1 httpx2==2.16.0 idna==3.20 jiter==0.19.0 jmespath==1.1.0 llvmlite==0.50.0 loguru==0.7.3
    model-hosting-container-standards==0.1.16 msgspec==0.22.0
    multidict==7.2.1 numba==0.68.1 openai==3.51.0 openai-harmony==0.0.8 opentelemetry-api==1.45.2
    opentelemetry-proto==1.45.1 opentelemetry-sdk==1.45.2 opentelemetry-semantic-conventions==0.66b2
    opentelemetry-semantic-conventions-ai==0.5.1 partial-json-parser==0.2.1.1.post7 pillow==13.0.0
    prometheus-client==0.26.0 prometheus-fastapi-instrumentator==8.1.0 python-multipart==0.0.33 propcache==0.5.4 protobuf==6.33.6 psutil==7.2.2 py-cpuinfo==9.0.0 pybase64==1.5.1
    pydantic==2.14.3 pydantic-core==2.50.4 pydantic-extra-types==2.11.1 pyzmq==27.3.0 requests==2.34.2
    setproctitle==1.3.8 six==1.17.0 sniffio==1.3.1 starlette==1.10.0 tqdm==4.70.1 truststore==0.10.5
    typing-extensions==4.16.0 typing-inspection==0.4.5 urllib3==2.8.0 uvicorn==0.54.0 uvloop==0.23.0 watchfiles==1.3.0
    yarl==1.25.1
""".split()  # noqa: SIM905 - one name per word is easier to read
"""What vLLM imports for `LLM.generate()` and its server, and torch and transformers do not bring. numba is newer than vLLM's pin,
because the pinned one refuses numpy 2.5."""
MACHINE = set(
    """torch torchvision triton transformers tokenizers safetensors huggingface_hub numpy packaging filelock regex yaml
    jinja2 sympy""".split()  # noqa: SIM905
)
"""Modules that the machine has."""
STUBS = """
    xgrammar xgrammar.openai_tool_call_schema xgrammar.structural_tag llguidance llguidance.hf llguidance.torch
    lmformatenforcer lmformatenforcer.integrations lmformatenforcer.integrations.vllm outlines_core
    outlines_core.json_schema
""".split()  # noqa: SIM905 - one name per word is easier to read
STUB = '''"""A stub: any name is an empty class."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
'''
WEIGHTS = '''"""A plug-in of vLLM: dummy weights as `kvloom bench engine` draws them. vLLM's own are smaller, and equal
in layers of equal shape, so tokens may select other experts."""

import itertools

import torch

NUMBERS = itertools.count()


@torch.no_grad()
def draw(param, low=0.0, high=0.0, seed=0):
    if param.device.type == "meta" or not param.is_floating_point():
        return
    if param.dim() < 2:
        param.fill_(1.0)
        return
    generator = torch.Generator(device=param.device).manual_seed(seed + next(NUMBERS))
    param.normal_(0.0, 0.02, generator=generator)


def register():
    from vllm.model_executor.model_loader import weight_utils

    weight_utils.initialize_single_dummy_weight = draw
'''
DROPPED = ["vllm/vllm-rs", "vllm/third_party/deep_gemm", "vllm/third_party/fmha_sm100"]
"""A server in Rust, and kernels that need a compiler: FP8 and Blackwell only."""
LARGE = [
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    "llvmlite/binding/libllvmlite.so",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
]
"""Files that are compressed one by one, in the order of the parts. All other files are one archive before them."""
ROOTS = """
    vllm vllm.entrypoints.llm vllm.v1.engine.core vllm.v1.engine.core_client vllm.v1.engine.llm_engine
    vllm.v1.worker.gpu_worker vllm.v1.worker.gpu_model_runner vllm.v1.worker.gpu.model_runner vllm.plugins
    vllm.model_executor.models.registry vllm.model_executor.models.llama vllm.model_executor.models.gemma3
    vllm.model_executor.models.qwen3_moe vllm.model_executor.models.qwen3_next vllm.platforms.cuda
    vllm.model_executor.model_loader.dummy_loader vllm.v1.attention.backends.flash_attn vllm.compilation.backends
    vllm.v1.executor.uniproc_executor vllm.v1.executor.multiproc_executor vllm.v1.metrics.loggers
    vllm.v1.spec_decode.ngram_proposer vllm.v1.spec_decode.ngram_proposer_gpu vllm.v1.engine.async_llm
    vllm.entrypoints.cli.main vllm.entrypoints.cli.serve vllm.entrypoints.openai.api_server vllm.benchmarks.serve
""".split()  # noqa: SIM905 - one name per word is easier to read
UNPACK = r"""#!/bin/sh
# sh unpack.sh PARTS TARGET: unpack the parts in the folder PARTS to TARGET/site and write TARGET/python.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=$(command -v "${PYTHON:-python3}")
mkdir -p "$2/site"
PYTHONPATH="$here" "$python" - "$here" "$1" "$2/site" <<'END'
import json, os, sys, tarfile
import zstandard

here, parts, site = sys.argv[1:]
names = sorted(name for name in os.listdir(parts) if name.startswith("part."))
assert names == [f"part.{i:03}" for i in range(len(names))], f"parts are missing: {names}"


class Parts:
    def __init__(self):
        self.left, self.file = list(names), None

    def read(self, size):
        while True:
            if self.file is None:
                if not self.left:
                    return b""
                self.file = open(os.path.join(parts, self.left.pop(0)), "rb")
            data = self.file.read(size)
            if data:
                return data
            self.file.close()
            self.file = None


class Member:
    def __init__(self, source, size):
        self.source, self.size = source, size

    def read(self, size=-1):
        data = self.source.read(min(self.size, size if size > 0 else 1 << 20)) if self.size else b""
        self.size -= len(data)
        return data


source, room = Parts(), sum(os.path.getsize(os.path.join(parts, name)) for name in names)
for name, size in json.load(open(os.path.join(here, "files.json"))):
    room -= size
    if room < 0:
        print("left out, parts are missing:", name)
        continue
    member = Member(source, size)
    stream = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(member)
    if name == "site.tar":
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            archive.extractall(site, filter="data")
    else:
        path = os.path.join(site, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as out:
            while data := stream.read(1 << 22):
                out.write(data)
    while member.read():
        pass
    print("unpacked:", name)
END
cat > "$2/python" <<END
#!/bin/sh
export PYTHONPATH="$2/site" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo
export VLLM_USE_FLASHINFER_SAMPLER=0  # vLLM expects FlashInfer otherwise
exec "$python" "\$@"
END
chmod +x "$2/python"
"""


def download(folder: Path) -> None:
    """Download the wheels that `folder` does not have."""
    folder.mkdir(parents=True, exist_ok=True)

    def key(name: str, version: str) -> str:
        return f"{name.replace('-', '_').lower()}-{version}"

    have = {key(*path.name.split("-")[:2]) for path in folder.glob("*.whl")}
    wanted = [one for one in (VLLM, ZSTD, *PACKAGES) if key(*one.split("==")) not in have]
    if not wanted:
        return
    tags = [f"manylinux_2_{minor}_x86_64" for minor in (31, 28, 27, 26, 24, 17, 12, 5)]
    tags += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--python-version=312", "--implementation=cp", "--abi=cp312", "--abi=abi3", "--abi=none"]
    subprocess.run([*command, *(f"--platform={tag}" for tag in tags), *wanted], check=True)


def wheel_of(folder: Path, requirement: str) -> Path:
    name, version = requirement.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    (found,) = (path for path in folder.iterdir() if path.match(pattern))
    return found


def lay_out(wheels: Path, site: Path) -> None:
    """Write the site folder: the files of all wheels without what is never needed, the stubs, and the plug-in."""
    for requirement in (VLLM, *PACKAGES):
        with zipfile.ZipFile(wheel_of(wheels, requirement)) as wheel:
            wheel.extractall(site, [name for name in wheel.namelist() if _needed(name)])
    for name in STUBS:
        path = site / name.replace(".", "/") / "__init__.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STUB)
    (site / "kvloom_weights.py").write_text(WEIGHTS)
    about = site / "kvloom_weights-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kvloom-weights\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nkvloom_weights = kvloom_weights:register\n"
    )


def _needed(name: str) -> bool:
    parts = name.split("/")
    if parts[0].endswith(".data") or (".dist-info" in parts[0] and "licenses" in parts):
        return False
    if any(part in ("tests", "testing", "testdata") for part in parts[:-1]) and parts[0] != "vllm":
        return parts[0] == "numba" and parts[1] == "testing"  # numba imports it
    if any(name == dropped or name.startswith(dropped + "/") for dropped in DROPPED):
        return False
    return not name.endswith((".pyi", ".a", ".proto", ".pxd", ".pyx", ".h", ".c", ".cpp", "/RECORD", ".pth"))


def imports(tree: ast.AST, must: bool = True) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Import that run with a module, and whether they must succeed. Those in functions do not run with it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, must
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports(ast.Module(node.orelse, []), must)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports(node, must and not isinstance(node, ast.Try | ast.If))


def missing(site: Path) -> dict[str, list[str]]:
    """Modules that are neither in the site nor on the machine, and which modules import them without a condition."""
    seen: set[str] = set()
    found: dict[str, list[str]] = {}
    todo = list(ROOTS)
    while todo:
        module = todo.pop()
        base = site / module.replace(".", "/")
        file = base / "__init__.py" if (base / "__init__.py").is_file() else base.with_name(base.name + ".py")
        if module in seen or not file.is_file():
            continue
        seen.add(module)
        todo.append(module.rpartition(".")[0] or module)
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        for node, must in imports(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                start = ".".join([*above, *([node.module] if node.module else [])])
                names = [start, *(f"{start}.{alias.name}" for alias in node.names)]
            top = names[0].split(".")[0]
            if top in sys.stdlib_module_names or top in MACHINE:
                continue
            if any(site.glob(f"{top}*")):
                todo += names
            elif must:
                found.setdefault(top, []).append(module)
    return found


def compress(source: Path, target: Path, level: int) -> None:
    if target.is_file() and target.stat().st_mtime >= source.stat().st_mtime:
        return
    print(f"compressing {source.name}, {source.stat().st_size / 2**20:.0f} MiB", flush=True)
    unfinished = target.with_suffix(".tmp")
    command = ["zstd", "-q", "-f", f"-{level}", "--long=27", "-T0", str(source), "-o", str(unfinished)]
    subprocess.run(command, check=True)
    unfinished.touch()  # zstd copies the time of the source
    unfinished.rename(target)


def pack(site: Path, work: Path, level: int) -> list[tuple[str, Path]]:
    """Compress the site. Return the names and the compressed files, in the order of the parts."""
    folder = work / "zst"
    folder.mkdir(exist_ok=True)
    archive = work / "site.tar"
    left_out = [f"--exclude=./{name}" for name in LARGE]
    fixed = ["--sort=name", "--owner=0", "--group=0", "--numeric-owner"]
    subprocess.run(["tar", *fixed, *left_out, "-cf", str(archive), "-C", str(site), "."], check=True)
    sources = [("site.tar", archive), *((name, site / name) for name in LARGE)]
    packed = []
    for name, source in sources:
        target = folder / f"{name.replace('/', '+')}.zst"
        compress(source, target, level)
        packed.append((name, target))
    return packed


def split(packed: list[tuple[str, Path]], out: Path, size: int) -> None:
    """Write the compressed files, one after the other, to parts of at most `size` bytes."""
    for old in out.glob("part.*"):
        old.unlink()
    number, room, part = 0, 0, None
    for _, path in packed:
        with path.open("rb") as source:
            while data := source.read(min(room, 1 << 20) or min(size, 1 << 20)):
                if not room:
                    if part is not None:
                        part.close()
                    part = (out / f"part.{number:03}").open("wb")
                    number, room = number + 1, size
                part.write(data)  # type: ignore[union-attr]
                room -= len(data)
    if part is not None:
        part.close()


def write_first(packed: list[tuple[str, Path]], wheels: Path, first: Path) -> None:
    """Write what unpacking needs."""
    shutil.rmtree(first, ignore_errors=True)
    first.mkdir(parents=True)
    with zipfile.ZipFile(wheel_of(wheels, ZSTD)) as wheel:
        names = [
            name
            for name in wheel.namelist()
            if name.startswith(("zstandard/__init__.py", "zstandard/backend_c."))
        ]
        wheel.extractall(first, names)
    (first / "files.json").write_text(json.dumps([(name, path.stat().st_size) for name, path in packed]))
    (first / "unpack.sh").write_text(UNPACK)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--work", type=Path, default=Path("build/vllm-bundle"), help="folder for wheels and the unpacked site"
    )
    add("--out", type=Path, default=Path("build/vllm-bundle/out"), help="folder for the parts")
    add("--part-mib", type=int, default=52, metavar="N", help="largest part in MiB (default: 52)")
    add("--level", type=int, default=12, metavar="N", help="zstd level (default: 12)")
    add("--check", action="store_true", help="stop after the check of imports")
    options = parser.parse_args()
    site, wheels = options.work / "site", options.work / "wheels"
    download(wheels)
    if not site.is_dir():
        lay_out(wheels, site)
    print(
        f"{sum(path.stat().st_size for path in site.rglob('*') if path.is_file()) / 2**20:.0f} MiB in {site}"
    )
    for name, users in sorted(missing(site).items()):
        print(
            f"not in the bundle and not on the machine: {name}, imported by {', '.join(sorted(set(users))[:3])}"
        )
    if options.check:
        return
    packed = pack(site, options.work, options.level)
    write_first(packed, wheels, options.out / "first")
    split(packed, options.out, options.part_mib << 20)
    for name, path in packed:
        print(f"{path.stat().st_size / 2**20:7.1f} MiB  {name}")
    parts = sorted(options.out.glob("part.*"))
    print(
        f"{len(parts)} parts, {sum(path.stat().st_size for path in parts) / 2**20:.0f} MiB, in {options.out}"
    )


if __name__ == "__main__":
    main()
