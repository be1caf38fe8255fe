"""A model loaded for trial in a process of its own, because llama.cpp may end the process that loads it.

A sound header can still hold numbers that llama.cpp asserts on (SIGABRT) or divides by (SIGFPE), or a
vocabulary whose tokeniser throws. `try_load` lets a child do everything that depends on the file alone: load
the model, create a small context, tokenise, compute a token. What ends the child is the reason; what it
survives, this process survives.

The child maps the file and leaves the weights as they lie, so it reads only what it computes with, and
what it read is in the page cache when this process loads the model next.
Called by: `engine.py`, after `header.check_header`. Run as: `python -m llm_engine.trial FILE`.
"""

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

from llm_engine import llama
from llm_engine.errors import ModelError

TIMEOUT_S = 300.0  # a model of many gigabytes on a slow disk; a damaged one fails in a second

_CONTEXT = llama.ContextParams(
    n_ctx=256,
    n_seq_max=1,
    n_batch=32,
    n_ubatch=32,
    n_threads=1,  # beside busy cores two threads wait for each other at every node: seconds, not milliseconds
    flash_attn=llama.FlashAttn.AUTO,
    type_k=llama.CacheType.F16,
    type_v=llama.CacheType.F16,
)

_SOURCE = re.compile(r"^\S+:\d+: ")  # "/build/llama.cpp/src/x.cpp:12: " before an assertion


def try_load(path: Path, *, timeout_s: float = TIMEOUT_S) -> None:
    """Load and run the model in a child process.

    Raises: ModelError with llama.cpp's reason if that fails, crashes, or takes longer than `timeout_s`.
    """
    command = [sys.executable, "-P", "-m", "llm_engine.trial", str(path)]  # -P: no modules from the cwd
    # Else an abort starts a debugger, which takes seconds and prints pages.
    environment = os.environ | {"GGML_NO_BACKTRACE": "1"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(str(path), f"llama.cpp did not load it within {timeout_s:.0f} s") from error
    if done.returncode != 0:
        raise ModelError(str(path), _reason(done))


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    last = _SOURCE.sub("", lines[-1]) if lines else ""
    match -done.returncode:
        case signal.SIGABRT:
            return f"llama.cpp aborted: {last or 'it gave no reason'}"
        case signal.SIGKILL:
            return "the system killed the process that tried to load it, most likely for want of memory"
        case number if number > 0:
            return f"llama.cpp crashed ({signal.Signals(number).name})"
    return last or f"its trial ended with status {done.returncode}"


# --- in the child ----------------------------------------------------------------------------------------


def main(path: str) -> int:
    """Do all that depends on the file alone. The last line on stderr says what failed."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash here is an answer, not worth a core file
    with llama.collected_errors() as errors:
        model = llama.load_model(path, llama.ModelParams(mmap=True, repack=False))
        if not model:
            return _fail(errors[0] if errors else "llama.cpp could not load it and gave no reason")
        context = llama.init_context(model, _CONTEXT)
        if not context:
            return _fail(errors[0] if errors else "llama.cpp could not create a context and gave no reason")
        _tokenize_every_byte(model)
        return _compute(context)


def _tokenize_every_byte(model: llama.ModelPointer) -> None:
    """Text with every byte that UTF-8 knows: a tokeniser that lacks one may throw, and nothing catches it."""
    planes = (range(1, 0x800), range(0x800, 0xD800, 0x1000), range(0x10000, 0x110000, 0x10000))
    text = "".join(chr(code) for plane in planes for code in plane)
    llama.tokenize(llama.vocab(model), text, add_special=True, parse_special=True)


def _compute(context: llama.ContextPointer) -> int:
    """Two tokens, then one: kernels check some numbers only now, and not the same for both."""
    batch = llama.Batch(_CONTEXT.n_batch, _CONTEXT.n_ctx)
    for start, tokens in ((0, [0, 1]), (2, [2])):
        batch.clear()
        batch.append(0, start, tokens, wants_logits=True)
        code = llama.decode(context, batch)
        if code != 0:
            return _fail(f"llama.cpp loads it but cannot compute with it (llama_decode returned {code})")
    return 0


def _fail(reason: str) -> int:
    print(reason, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
