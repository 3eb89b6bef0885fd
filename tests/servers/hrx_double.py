"""A double of an engine's ``serve`` on an hrx device, written from its public documentation.

The command line, the three variables that it needs, 503 while the model loads, and the log of
which kernels were chosen: with ``GGML_HRX_LOG_DISPATCH`` set, each kernel is named once in the life
of the process, at its first use, and ``GGML_HRX_DISABLE_DISPATCH`` (parts of names, with commas
between) puts another in its place. Behind the door stands a llama-server, so the addresses and
faults are those of llama_double.py.

    HSA_USE_SVM=0 HSA_USERPTR_FOR_PAGED_MEM=0 HRX_ALLOW_NO_SVM=1 \\
        python tests/servers/hrx_double.py serve MODEL --device hrx --port 8099 --host 127.0.0.1
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from servers.double import Answer, Life, log, run_server
from servers.llama_double import LlamaDouble, make_parser

NEEDED = {"HSA_USE_SVM": "0", "HSA_USERPTR_FOR_PAGED_MEM": "0", "HRX_ALLOW_NO_SVM": "1"}

#: Kernels that a pass of one token takes, each with what takes over where it is switched off.
ALONE = (
    ("flash_attention_decode_split", "single", "flash_attention"),
    ("mul_mat.decode.q4_k", "single", "mul_mat.generic"),
    ("rms_norm_mul", "fused", "rms_norm"),
    ("hip.scale", "single", "scale"),
    ("rope", "single", None),
)
#: And those that only a pass of several tokens takes.
TOGETHER = (("mul_mat.batch.q4_k", "single", "mul_mat.generic"),)


class HrxDouble(LlamaDouble):
    """Answers as a llama-server on an hrx device, and names its kernels."""

    def __init__(self, asked: argparse.Namespace, life: Life) -> None:
        super().__init__(asked, life)
        self._logs = bool(os.environ.get("GGML_HRX_LOG_DISPATCH"))
        parts = os.environ.get("GGML_HRX_DISABLE_DISPATCH", "").split(",")
        self._disabled = [part.strip() for part in parts if part.strip()]
        self._named: set[str] = set()

    async def _reply(
        self, body: dict[str, Any], prompt: list[int], slot: int, *, openai: bool
    ) -> Answer:
        self._choose(ALONE)
        n_before = self.n_decode, self.n_busy_slots
        answer = await super()._reply(body, prompt, slot, openai=openai)
        n_shared = self.n_busy_slots - n_before[1] - (self.n_decode - n_before[0])
        if n_shared > 0 or sum(self.busy) > 1:
            self._choose(TOGETHER)
        return answer

    def _choose(self, kernels: tuple[tuple[str, str, str | None], ...]) -> None:
        for name, kind, other in kernels:
            off = any(part in name or part == kind for part in self._disabled)
            chosen = other if off and other is not None else name
            if self._logs and chosen not in self._named:
                self._named.add(chosen)
                log(f"ggml_hrx dispatch: {chosen} ({'single' if off else kind})")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("command", choices=("serve",))
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="the same as -m MODEL")
    parser.add_argument("--device", default="auto", choices=("auto", "hrx", "vulkan", "npu"))
    asked = parser.parse_args()
    asked.model = asked.model_name or asked.model
    if not Path(asked.model).exists():
        log(f"1bit: {asked.model or 'no model'}: no such file")
        sys.exit(1)
    wrong = [f"{name}={value}" for name, value in NEEDED.items() if os.environ.get(name) != value]
    if asked.device == "hrx" and wrong:
        log(f"hrx: no device registered: this runtime needs {' '.join(wrong)}")
        sys.exit(1)
    life = Life(asked)
    listening = life.begin()
    log(f"1bit: serving {asked.model} on hrx, http://{asked.host}:{asked.port}")

    async def run() -> None:
        double = HrxDouble(asked, life)
        await run_server(double.handle, listening, double.background())

    asyncio.run(run())


if __name__ == "__main__":
    main()
