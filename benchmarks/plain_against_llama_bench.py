"""How busy the harness keeps the engine: plain arm against llama-bench, and what comparing costs.

Interleaved pairs on one build, model, depth and number of threads: llama-bench generates N tokens
behind DEPTH, then the plain arm decodes N tokens behind a prompt of DEPTH (choosing, hashing and
keeping every row included). Prints the ratio of tokens per second pair by pair, its median with a
95 % interval from order statistics, and the share of a replay's time that goes into comparing.

    python benchmarks/plain_against_llama_bench.py --engine results/builds/<digest> \
        --tools results/builds/<digest> --model results/models/<key>/<name>.gguf

Close everything else first: a pair in which others used the processors is marked and not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
from routewise.engine import Model, Settings, load_engine
from routewise.machine import describe_machine, other_cpu_share, read_load, set_engine_environment
from routewise.replay import plan_passes, run_plain, run_replay
from scipy.stats import binom

CONTENDED_CORES = 0.1


def llama_bench(tool: Path, model: Path, settings: Settings, depth: int, n: int) -> float:
    """Return llama-bench's tokens per second of one run of ``n`` tokens."""
    command = [str(tool), "-m", str(model), "-p", "0", "-n", str(n), "-d", str(depth), "-r", "1"]
    command += ["-t", str(settings.threads), "-fa", str(int(settings.flash_attention))]
    command += ["-ctk", settings.kv_type, "-ctv", settings.kv_type, "-ngl", "0", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)[0]["samples_ts"][0])


def plain_arm(
    model: Model, settings: Settings, prompt: list[int], n: int, room: npt.NDArray[np.float32]
) -> float:
    """Return the plain arm's tokens per second, everything that it keeps included."""
    with model.open_context(settings) as context:
        run = run_plain(context, prompt, n, micro_batch=settings.micro_batch, top_k=10, room=room)
    return n / run.decode_s


def median_interval(values: list[float], level: float = 0.95) -> tuple[float, float]:
    """Return the distribution-free interval of the median, from order statistics."""
    ordered = sorted(values)
    low = int(binom.ppf((1 - level) / 2, len(ordered), 0.5))
    return ordered[max(low - 1, 0)], ordered[min(len(ordered) - low, len(ordered) - 1)]


def comparing_share(
    model: Model, settings: Settings, prompt: list[int], n: int, width: int
) -> float:
    """Return the share of a replay at ``width`` that goes into comparing its rows."""
    with model.open_context(settings) as context:
        plain = run_plain(context, prompt, n, micro_batch=settings.micro_batch, top_k=2)
    plan = plan_passes(
        f"w{width}", prompt, plain.token_ids, model.n_vocab, n_neighbours=0, context=0, seed=0
    )
    with model.open_context(settings) as context:
        replay = run_replay(context, plain, plan, micro_batch=settings.micro_batch, top_k=2)
    return replay.compare_s / (replay.compare_s + replay.engine_s)


def main(
    engine: Path, tools: Path, model: Path, depth: int, n: int, pairs: int, threads: int
) -> None:
    """Run the pairs and print what they gave."""
    set_engine_environment({})
    settings = Settings(1024, 512, threads, flash_attention=True)
    opened = load_engine(engine / "lib").open_model(model)
    prompt = np.random.default_rng(1).integers(0, opened.n_vocab, depth).tolist()
    tool = tools / "bin" / "llama-bench"
    print(
        f"{describe_machine()['kind']}; {model.name}; depth {depth}, {n} tokens, {threads} threads"
    )
    ratios: list[float] = []
    room = np.empty((n + 1, opened.n_vocab), np.float32)  # as a cell does: one for all prompts
    plain_arm(opened, settings, prompt, n, room)
    for tried in range(1, 4 * pairs + 1):
        if len(ratios) == pairs:
            break
        before = read_load([os.getpid()])
        bench = llama_bench(tool, model, settings, depth, n)
        middle = read_load([os.getpid()])
        ours = plain_arm(opened, settings, prompt, n, room)
        share = other_cpu_share(middle, read_load([os.getpid()]))
        # llama-bench is a finished child: what it used beyond its threads is others' time
        bench_span = middle.at_s - before.at_s
        bench_busy = (middle.busy_s - before.busy_s + middle.steal_s - before.steal_s) / bench_span
        contended = share > CONTENDED_CORES or bench_busy > threads + CONTENDED_CORES
        print(
            f"pair {tried}: llama-bench {bench:.1f}, plain arm {ours:.1f} tokens/s,"
            f" ratio {ours / bench:.3f}{', contended: not counted' if contended else ''}"
        )
        if not contended:
            ratios.append(ours / bench)
    if len(ratios) < pairs:
        print(f"only {len(ratios)} of {pairs} pairs were not contended: close what else runs")
    if ratios:
        low, high = median_interval(ratios)
        print(f"plain arm / llama-bench: median {np.median(ratios):.3f}", end="")
        print(f" (95 % {low:.3f} to {high:.3f}), n = {len(ratios)} pairs; wanted at least 0.97")
    for width in (2, 9):
        share = comparing_share(opened, settings, prompt, n, width)
        print(f"share of a replay at width {width} spent comparing: {share:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", required=True, type=Path, help="folder of the engine's build")
    parser.add_argument("--tools", required=True, type=Path, help="folder of the tools' build")
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--depth", type=int, default=256, help="tokens before the first")
    parser.add_argument("--n", type=int, default=64, help="tokens a run")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    main(**vars(parser.parse_args()))
