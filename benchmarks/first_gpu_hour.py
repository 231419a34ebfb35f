"""The first hour on new devices: what works, what is wrong, and what is slower than the links allow.

    python benchmarks/first_gpu_hour.py                       # all parts that this host can run
    python benchmarks/first_gpu_hour.py --parts a b d
    python benchmarks/first_gpu_hour.py --engine-python .venv-vllm/bin/python --model-7b DIR

| part | needs | what |
| --- | --- | --- |
| a | anything | doctor, the device in torch, unit tests on it, a collective group of one |
| b | anything | short runs in every mode of the learner, compared with the first step on the CPU |
| c | anything | a larger random model (by free memory): seconds of a publish, against computed ones |
| d | anything | copies to the host, pageable and pinned; memory of one process read by another; digests |
| e | vLLM | the contract of engines, under both of vLLM's model runners |
| f | a CUDA device | weights by NCCL between processes of one device |
| f | 2 devices or a CPU | two ranks, `collective` weights, a producer killed |
| g | 8 devices, `--model-7b` | 20 steps with four ranks and four engines |
| h | a second host | the commands to type there |

The runs of part b go side by side; the seconds printed for one are those until it was known.
The report, `benchmarks/results/first_hour.json`, has one verdict for each check: works, wrong, slower (than computed)
or "not here" with what is missing. The script ends with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import reports  # noqa: E402, RUF100
import torch  # noqa: E402, RUF100

from asyncrl.engine import GAP_LIMIT  # noqa: E402, RUF100
from asyncrl.planner.weight_seconds import LINKS, sync_seconds  # noqa: E402, RUF100
from asyncrl.runtime.device import Device  # noqa: E402, RUF100

RESULTS = ROOT / "benchmarks" / "results" / "first_hour.json"
RUNS = ROOT / "runs" / "first-hour"
QUICKSTART = ROOT / "configs" / "quickstart.toml"
STEPS = 5
CORES_OF_A_RUN = 4  # short runs side by side: nothing in them is timed
RUN_S, TESTS_S, CALL_S = 900, 1800, 300
SLOWER = 2.0  # times the computed seconds
COPY_BYTES = 64 << 20
DIGEST_BYTES = 1 << 30
#: Sizes of the model of part c: 7.0 billion parameters, 2.8 billion, or 31 million.
LARGE = {"hidden_size": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp_size": 14336}
MIDDLE = {"hidden_size": 3072, "layers": 28, "heads": 24, "kv_heads": 8, "head_dim": 128, "mlp_size": 8192}
SMALL = {"hidden_size": 512, "layers": 8, "heads": 8, "kv_heads": 4, "head_dim": 64, "mlp_size": 2048}
#: Settings of the runs of part b: the feature of a device that one needs, and what is set.
MODES: dict[str, tuple[str, list[str]]] = {
    "float32": ("", []),
    "bfloat16": ("", ["model.dtype=bfloat16"]),
    "varlen": ("varlen_attention", ["model.dtype=bfloat16", "model.attn_implementation=varlen"]),
    "flash attention": ("flash_attention", ["model.dtype=bfloat16", "model.attn_implementation=flash_attention_2"]),
    "compiled": ("triton", ["learner.compile=true"]),
    "in place": ("", ["weightsync.in_place=true"]),
    "states on the host, by parts": ("pin_memory", ["learner.cpu_offload=true", "learner.load=parts"]),
    "states on the host, whole": ("pin_memory", ["learner.cpu_offload=true", "learner.load=whole"]),
    "idle states on the host": ("pin_memory", ["learner.offload_idle=true"]),
}


#: NCCL refuses two processes on one device, unless it takes them for processes of different hosts.
OTHER_HOSTS = """import os

os.environ["NCCL_HOSTID"] = str(os.getpid())
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
"""
#: One process adds 1 to the tensor of another.
SHARED = """import torch, torch.multiprocessing as processes

def add_one(queue):
    tensor = queue.get()
    tensor += 1
    torch.cuda.synchronize()
    del tensor

if __name__ == "__main__":
    processes.set_start_method("spawn")
    queue = processes.Queue()
    child = processes.Process(target=add_one, args=(queue,))
    child.start()
    tensor = torch.ones(8, device="cuda")
    queue.put(tensor)
    child.join(120)
    assert tensor.sum().item() == 16
"""


class Verdict(NamedTuple):
    """The result of one check."""

    verdict: str  # works, wrong, slower, not here
    said: str = ""
    figures: dict[str, float] = {}


class Hour:
    """Facts that the parts share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = Device.find(args.device)
        on_device = self.device.type != "cpu"
        self.count = torch.get_device_module(self.device.type).device_count() if on_device else 0
        self.first_rewards: dict[str, float] = {}

    @property
    def on_device(self) -> bool:
        return self.device.type != "cpu"

    @property
    def sizes(self) -> dict[str, int]:
        """Of the model of part c: the large one trains in 16 bytes per parameter and its activations."""
        if not self.on_device:
            return SMALL
        module: Any = torch.get_device_module(self.device.type)
        try:
            free, _ = module.mem_get_info()
        except (AttributeError, NotImplementedError, RuntimeError):  # a simulated device has no memory of its own
            free = 0
        return LARGE if free > 160e9 else MIDDLE if free > 60e9 else SMALL


Check = tuple[str, Callable[[], Verdict]]


def call(words: Sequence[str], *, limit_s: float, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and the end of the output of a program; 124 if it had to be stopped."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **(env or {})}
    with subprocess.Popen(
        words, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as child:  # fmt: skip
        try:
            out, _ = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            return 124, f"no end within {limit_s:g} s"
    return child.returncode, out[-2000:]


def works(words: Sequence[str], *, limit_s: float, env: dict[str, str] | None = None) -> Verdict:
    code, out = call(words, limit_s=limit_s, env=env)
    last = out.strip().splitlines()[-1] if out.strip() else ""
    return Verdict("works", last) if code == 0 else Verdict("wrong", f"exit {code}: {out}")


def run(
    hour: Hour, name: str, *settings: str, device: str = "", env: dict[str, str] | None = None
) -> tuple[Verdict, list[dict[str, Any]]]:
    """A short run from the quick start's settings, its audit, and the learner's lines."""
    folder = RUNS / name.replace(" ", "-").replace(",", "")
    shutil.rmtree(folder, ignore_errors=True)
    device = device or hour.device.type
    words = [f"run.dir={folder}", f"learner.steps={STEPS}", f"learner.device={device}", f"producers.device={device}"]
    words += ["evaluation.path=", "evaluation.every=0", "evaluation.at_start=false", "producers.count=1", *settings]
    asyncrl = [sys.executable, "-m", "asyncrl"]
    sets = [word for one in words for word in ("--set", one)]
    code, out = call([*asyncrl, "launch", "all", str(QUICKSTART), *sets], limit_s=RUN_S, env=env)
    if code:
        return Verdict("wrong", f"exit {code}: {out}"), []
    lines = [json.loads(line) for line in (folder / "metrics" / "learner.jsonl").read_text().splitlines()]
    code, out = call([*asyncrl, "audit", str(folder)], limit_s=CALL_S)
    if code:
        return Verdict("wrong", f"audit, exit {code}: {out}"), lines
    gap = max(line.get("lag/0/logprob_gap_mean", 0.0) for line in lines)
    figures = {"gap": gap, "reward": lines[0]["reward_mean"], "step_s": lines[-1]["step_s"]}
    limit = GAP_LIMIT[next((one.split("=")[1] for one in settings if one.startswith("model.dtype=")), "float32")]
    said = "" if gap <= limit else f"engine and learner differ by {gap:.2g} nats, at most {limit:g} is expected"
    return Verdict("wrong" if said else "works", said, figures), lines


# ---------------------------------------------------------------- the parts


def part_a(hour: Hour) -> Iterator[Check]:
    device = hour.device

    def computes() -> Verdict:
        left, right = torch.randn(256, 256), torch.randn(256, 256)
        gap = (left.to(device.torch_device) @ right.to(device.torch_device)).cpu().sub(left @ right).abs().max()
        memory = {name: float(value) for name, value in device.memory().items()}
        return Verdict("works" if gap < 1e-2 else "wrong", f"{device}, {device.title}", {"gap": float(gap), **memory})

    def groups() -> Verdict:
        from datetime import timedelta

        from weightsync.transports.process_groups import finish, group_maker, leave

        dist: Any = torch.distributed
        store = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=30))
        group = group_maker(device.dist_backend)(store, 0, 1, timedelta(seconds=30))
        sent = torch.arange(8, device=device.torch_device)
        options = dist.BroadcastOptions()
        finish(group.broadcast([sent], options), group, within_s=30, on_device=hour.on_device)
        right = sent.cpu().tolist() == list(range(8))
        leave(group)
        return Verdict("works" if right else "wrong", device.dist_backend)

    tests = [f"tests/unit/test_{name}.py" for name in ("device", "devices", "liger", "attention", "sum_digest")]
    yield "doctor", lambda: works([sys.executable, "-m", "asyncrl", "doctor"], limit_s=CALL_S)
    yield "device", computes
    yield "collective group", groups
    yield "unit tests", lambda: works([sys.executable, "-m", "pytest", "-q", "-n", "0", *tests], limit_s=TESTS_S)


def part_b(hour: Hour) -> Iterator[Check]:
    prepare = [sys.executable, "-m", "asyncrl", "demo", "--prepare-only"]
    yield "prompts and model", lambda: works(prepare, limit_s=RUN_S)

    def on_cpu() -> Verdict:
        verdict, _ = run(hour, "reference on the CPU", device="cpu")
        hour.first_rewards["cpu"] = verdict.figures.get("reward", -1.0)
        return verdict

    def mode(name: str, settings: list[str]) -> Verdict:
        verdict, _ = run(hour, name, *settings)
        away = abs(verdict.figures.get("reward", 0.0) - hour.first_rewards.get("cpu", 0.0))
        if verdict.verdict == "works" and away > 0.1:  # 128 samples: other roundings draw some other tokens
            return Verdict("wrong", f"the first reward is {away:.2f} away from that on the CPU", verdict.figures)
        return verdict

    yield "reference on the CPU", on_cpu
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CORES_OF_A_RUN)) as pool:
        begun = {}
        for name, (feature, settings) in MODES.items():
            why = unfit(hour, feature)
            begun[name] = pool.submit(Verdict, "not here", why) if why else pool.submit(mode, name, settings)
        for name, verdict in begun.items():
            yield name, verdict.result  # bounded: RUN_S


def unfit(hour: Hour, feature: str) -> str:
    """Why a mode that needs this feature cannot run here; empty: it can."""
    if feature and not hour.device.supports(feature):
        return f"{hour.device.type} has no {feature}"
    if feature == "flash_attention" and find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    return ""


def part_c(hour: Hour) -> Iterator[Check]:
    def publishes() -> Verdict:
        from learners.warm_start.tiny_model import count_parameters, make_tiny_qwen3, save_model

        sizes = hour.sizes
        folder = RUNS / f"model-{sizes['hidden_size']}"
        start = ROOT / "runs" / "models" / "running_sum"
        if not (folder / "config.json").exists():
            shutil.copytree(start, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
            vocabulary = json.loads((start / "config.json").read_text())["vocab_size"]
            with hour.device.torch_device:  # a CPU takes minutes to draw billions of numbers
                model: Any = make_tiny_qwen3(vocabulary, seed=0, **sizes)
            print(f"    {count_parameters(model) / 1e9:.3g} billion parameters", flush=True)
            save_model(folder, model.to(torch.bfloat16))
            del model
            hour.device.empty_cache()
        dtype = "bfloat16" if hour.on_device else "float32"  # many CPUs only emulate bfloat16
        settings = [f"model.path={folder}", f"model.dtype={dtype}", "learner.steps=3", "sampling.max_new_tokens=16"]
        settings += ["weightsync.in_place=true", "learner.optim.lr=1e-6"]  # both halves share the device
        verdict, lines = run(hour, "a large model", *settings)
        if verdict.verdict != "works":
            return verdict
        nbytes = int(lines[-1]["publish_bytes"])
        computed = sync_seconds(nbytes, workers=1).blocked
        took = min(line["publish_s"] for line in lines[1:])
        figures = {"bytes": nbytes, "publish_s": took, "computed_s": computed, "peak": lines[-1]["memory_peak_bytes"]}
        slow = hour.on_device and took > SLOWER * computed
        return Verdict("slower" if slow else "works", f"{took:.2g} s, computed {computed:.2g} s", figures)

    yield "publish", publishes


def part_d(hour: Hour) -> Iterator[Check]:
    def copies() -> Verdict:
        source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=hour.device.torch_device)
        figures = {}
        for name in ("pageable", "pinned") if hour.device.pin_memory_ok else ("pageable",):
            room = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=name == "pinned")
            seconds = best_time(hour, partial(room.copy_, source, non_blocking=True))
            figures[f"{name}_gb_s"] = COPY_BYTES / 1e9 / seconds
            if int(room.sum()) != COPY_BYTES:
                return Verdict("wrong", f"{name}: the bytes differ")
        slow = hour.device.type == "cuda" and figures["pinned_gb_s"] < 50 / SLOWER
        return Verdict("slower" if slow else "works", "50 GB/s is computed for PCIe 5.0", figures)

    def shared() -> Verdict:
        if not hour.device.supports("ipc"):
            return Verdict("not here", f"{hour.device.type} has no handles for other processes")
        script = RUNS / "shared_memory.py"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(SHARED)
        return works([sys.executable, str(script)], limit_s=CALL_S)

    def digests() -> Verdict:
        from weightsync.transports.device_digest import sum_tensors

        device = hour.device.torch_device
        numbers = torch.randint(
            0, 256, (DIGEST_BYTES if hour.on_device else COPY_BYTES,), dtype=torch.uint8, device=device
        )
        parts = numbers.view(-1, COPY_BYTES).unbind()
        seconds = best_time(hour, partial(sum_tensors, parts, device))
        copied = best_time(hour, partial(torch.empty_like(numbers).copy_, numbers))
        figures = {"digest_gb_s": numbers.nbytes / 1e9 / seconds, "copy_gb_s": numbers.nbytes / 1e9 / copied}
        slow = hour.device.type == "cuda" and figures["digest_gb_s"] < SLOWER * LINKS.network / 1e9
        return Verdict("slower" if slow else "works", f"a port carries {LINKS.network / 1e9:g} GB/s", figures)

    yield "copies to the host", copies
    yield "memory of another process", shared
    yield "digests of `direct`", digests


def best_time(hour: Hour, work: Callable[[], Any], tries: int = 5) -> float:
    """Seconds of the fastest try, the device's work included."""
    found = []
    for _ in range(tries):
        hour.device.synchronize()
        start = time.perf_counter()
        work()
        hour.device.synchronize()
        found.append(time.perf_counter() - start)
    return min(found)


def part_e(hour: Hour) -> Iterator[Check]:
    python = hour.args.engine_python or ROOT / ".venv-vllm" / "bin" / "python"
    for runner in ("0", "1"):

        def contract(runner: str = runner) -> Verdict:
            if not python.exists():
                return Verdict("not here", f"there is no {python}: make vllm, or --engine-python")
            if runner == "1" and hour.device.type != "cuda":
                return Verdict("not here", "vLLM's second model runner needs Triton")
            env = {"VLLM_USE_V2_MODEL_RUNNER": runner, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
            words = [str(python), "-m", "pytest", "-q", "tests/engines/test_engine_contract.py", "-k", "vllm-"]
            return works(words, limit_s=TESTS_S, env=env)

        yield f"engine contract, second model runner {'on' if runner == '1' else 'off'}", contract


def part_f(hour: Hour) -> Iterator[Check]:
    enough = not hour.on_device or hour.count >= 2
    missing = Verdict("not here", f"{hour.count} device, 2 are needed")

    def two_ranks(*settings: str) -> Verdict:
        return run(hour, f"two ranks {settings[-1]}", "learner.ranks=2", *settings)[0] if enough else missing

    def one_device(transport: str) -> Verdict:
        if hour.device.type != "cuda":
            return Verdict("not here", "NCCL needs a CUDA device")
        folder = RUNS / "other-hosts"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(OTHER_HOSTS)
        env = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])}
        settings = [f"weightsync.transport={transport}", "weightsync.in_place=true", "producers.count=2"]
        return run(hour, f"{transport} in one device", *settings, env=env)[0]

    def killed() -> Verdict:
        tests = "tests/e2e/test_weight_sync_run.py"
        return works([sys.executable, "-m", "pytest", "-q", "-n", "0", tests], limit_s=TESTS_S) if enough else missing

    for transport in ("collective", "direct"):
        yield f"{transport} weights over NCCL in one device", partial(one_device, transport)
    yield "FSDP2, local weights", lambda: two_ranks("weightsync.transport=local")
    yield "FSDP2, collective weights", lambda: two_ranks("producers.count=2", "weightsync.transport=collective")
    yield "a member joins late, another is killed", killed


def part_g(hour: Hour) -> Iterator[Check]:
    def large() -> Verdict:
        if hour.count < 8 or not hour.args.model_7b:
            return Verdict(
                "not here", f"{hour.count} devices and --model-7b {hour.args.model_7b}; 8 and a folder are needed"
            )
        settings = [f"model.path={hour.args.model_7b}", "model.dtype=bfloat16", "learner.ranks=4", "producers.count=4"]
        settings += ["producers.engine=vllm", "learner.steps=20", "learner.gradient_checkpointing=true"]
        return run(hour, "four ranks and four engines", *settings)[0]

    yield "7B, four ranks and four engines", large


def part_h(hour: Hour) -> Iterator[Check]:
    del hour
    said = (
        "by hand (docs/clusters.md): launch all on the first host with network.host and keys, then "
        "`asyncrl launch producers FILE --connect URL --key FILE` on the second, for each weightsync.transport"
    )
    yield "two hosts", lambda: Verdict("not here", said)


PARTS = {"a": part_a, "b": part_b, "c": part_c, "d": part_d, "e": part_e, "f": part_f, "g": part_g, "h": part_h}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=sorted(PARTS), default=sorted(PARTS))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or npu")
    parser.add_argument("--engine-python", type=Path, help="the interpreter that has vLLM (default: .venv-vllm)")
    parser.add_argument("--model-7b", type=Path, help="a folder of a model of 7 billion parameters, for part g")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    hour, rows = Hour(args), []
    device = {"type": hour.device.type, "title": hour.device.title, "count": hour.count}
    for part in args.parts:
        for name, check in PARTS[part](hour):
            started = time.monotonic()
            try:
                found = check()
            except Exception as error:  # a check that breaks is a finding, and the others go on
                found = Verdict("wrong", f"{type(error).__name__}: {error}")
            took = time.monotonic() - started
            said = found.said.splitlines()[0] if found.said else ""
            print(f"{part}  {found.verdict:<8} {name:<44} {took:6.1f} s  {said}", flush=True)
            rows.append({"part": part, "check": name, **found._asdict(), "took_s": round(took, 1)})
            reports.write(args.out, "the first hour on this device", device=device, checks=rows)  # it may be cut short
    return int(any(row["verdict"] == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
