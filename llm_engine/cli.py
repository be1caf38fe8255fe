"""`llm-engine`: one prompt, tokens as they come. The model and engine flags here serve every command."""

import argparse
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from llm_engine.config import EngineConfig
from llm_engine.engine import Engine
from llm_engine.errors import ConfigError, EngineError, RequestError
from llm_engine.generation import Delta, Failed, Finished, GenerateRequest, Generation
from llm_engine.gguf import DEFAULT_MODEL
from llm_engine.sampling import SamplingParams

EXIT_FAULT = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def add_version_flag(parser: argparse.ArgumentParser) -> None:
    """`--version`, which ends the process."""
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('llm-ring')}")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that `engine_config` reads."""
    _add_model_flags(parser.add_argument_group("model"))
    engine = parser.add_argument_group("engine")
    _add_batching_flags(engine)
    _add_reuse_flags(engine)
    _add_llama_flags(engine)


def _add_model_flags(model: argparse._ArgumentGroup) -> None:
    model.add_argument(
        "--model",
        default=os.environ.get("MODEL_PATH") or None,
        metavar="NAME",
        help=f"a GGUF path, REPO, REPO:FILE, or smollm2 (default: {DEFAULT_MODEL}; environment: MODEL_PATH)",
    )
    model.add_argument(
        "--model-url",
        default=os.environ.get("MODEL_URL") or None,
        metavar="URL",
        help="fetch the GGUF from a plain URL; --model is then where to keep it (environment: MODEL_URL)",
    )
    model.add_argument(
        "--no-download",
        action="store_true",
        default=os.environ.get("SKIP_MODEL_DOWNLOAD") == "1",
        help="never use the network; fail if it is not cached (environment: SKIP_MODEL_DOWNLOAD=1)",
    )
    model.add_argument("--mlock", action="store_true", help="keep the weights in RAM, never swapped")
    model.add_argument(
        "--mmap",
        action="store_true",
        help="map the model file, so that processes share it; slower than a copy in huge pages",
    )


def _add_batching_flags(engine: argparse._ArgumentGroup) -> None:
    engine.add_argument(
        "--max-inflight",
        type=int,
        metavar="N",
        help="requests decoded at once (default: 4 on a CPU, 16 with GPU layers)",
    )
    engine.add_argument(
        "--ctx-size",
        type=int,
        default=4096,
        metavar="TOKENS",
        help="context of each slot, prompt and answer (default: %(default)s, at most the model's)",
    )
    engine.add_argument(
        "--max-kv-mib-per-session",
        type=int,
        default=512,
        metavar="MIB",
        help="KV of one conversation; a context that would take more is shorter (default: %(default)s)",
    )
    engine.add_argument(
        "--batch-size",
        type=int,
        default=512,
        metavar="TOKENS",
        help="tokens in one call of llama.cpp at most (default: %(default)s)",
    )
    engine.add_argument(
        "--batch-invariant",
        action=argparse.BooleanOptionalAction,
        help="keep to settings with which no answer depends on what ran beside it;"
        " without, long prompts take less time (default: on a CPU)",
    )
    engine.add_argument(
        "--target-step-ms",
        type=int,
        default=0,
        metavar="MS",
        help="take requests while a step stays within this; 0: while slots are free (default: %(default)s)",
    )
    engine.add_argument(
        "--prefill-chunk",
        type=int,
        metavar="TOKENS",
        help="prompt tokens of one step (default: as many as measured step times allow)",
    )


def _add_reuse_flags(engine: argparse._ArgumentGroup) -> None:
    engine.add_argument(
        "--cache-ram-mib",
        type=int,
        default=2048,
        metavar="MIB",
        help="host memory for the KV of prompts whose slot was taken; 0 for none (default: %(default)s)",
    )
    engine.add_argument(
        "--session-dir",
        type=Path,
        metavar="DIR",
        help="keep there what host memory has no room for, and everything over a restart (default: nowhere)",
    )
    engine.add_argument(
        "--session-dir-mib",
        type=int,
        default=8192,
        metavar="MIB",
        help="most of it that this process keeps there (default: %(default)s)",
    )
    engine.add_argument(
        "--no-cache-prompt",
        action="store_true",
        help="compute every prompt anew, whatever earlier ones had in common with it",
    )


def _add_llama_flags(engine: argparse._ArgumentGroup) -> None:
    engine.add_argument("--threads", type=int, metavar="N", help="compute threads (default: every core)")
    engine.add_argument(
        "--n-gpu-layers",
        type=int,
        default=0,
        metavar="N",
        help="layers on the GPU; -1 for all (default: %(default)s)",
    )
    engine.add_argument(
        "--split-mode",
        choices=("none", "layer", "row"),
        default="layer",
        help="over several GPUs: whole layers, the rows of matrices, or one GPU alone (default: %(default)s)",
    )
    engine.add_argument(
        "--main-gpu",
        type=int,
        default=0,
        metavar="N",
        help="the GPU that --split-mode none uses (default: %(default)s)",
    )
    engine.add_argument(
        "--flash-attn",
        choices=("auto", "on", "off"),
        default="on",
        help="flash attention (default: %(default)s)",
    )
    engine.add_argument(
        "--cache-type-k",
        metavar="TYPE",
        help="element type of the K cache: bf16, f16, q8_0, ... (default: bf16 on an x86 CPU, unless"
        " --no-batch-invariant or --flash-attn off; else f16)",
    )
    engine.add_argument(
        "--cache-type-v",
        default="f16",
        metavar="TYPE",
        help="element type of the V cache: f16, q8_0, ... (default: %(default)s)",
    )


def add_session_ttl_flag(parser: argparse.ArgumentParser) -> None:
    """How long KV outlives its last use, for every command that runs an engine."""
    parser.add_argument(
        "--session-ttl",
        type=int,
        default=300,
        metavar="S",
        help="seconds after which what nobody used is dropped, wherever it is kept; 0 for never"
        " (default: %(default)s)",
    )


def add_max_tokens_flag(parser: argparse.ArgumentParser) -> None:
    """The limit of answers whose request names none, for commands that serve."""
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=4096,
        metavar="N",
        help="tokens generated when a request names no limit (default: %(default)s, or the room left)",
    )


def engine_config(
    args: argparse.Namespace, *, max_tokens: int = 4096, session_ttl: int = 300
) -> EngineConfig:
    """The engine's options from parsed flags.

    Raises: ConfigError.
    """
    return EngineConfig(
        model=args.model,
        model_url=args.model_url,
        download=not args.no_download,
        max_inflight=args.max_inflight,
        ctx_size=args.ctx_size,
        max_kv_mib_per_session=args.max_kv_mib_per_session,
        max_tokens=max_tokens,
        threads=args.threads,
        n_gpu_layers=args.n_gpu_layers,
        split_mode=args.split_mode,
        main_gpu=args.main_gpu,
        flash_attn=args.flash_attn,
        cache_type_k=args.cache_type_k,
        cache_type_v=args.cache_type_v,
        mlock=args.mlock,
        mmap=args.mmap,
        batch_size=args.batch_size,
        batch_invariant=args.batch_invariant,
        target_step_ms=args.target_step_ms,
        prefill_chunk=args.prefill_chunk,
        cache_prompt=not args.no_cache_prompt,
        cache_ram_mib=args.cache_ram_mib,
        session_ttl=session_ttl,
        session_dir=args.session_dir,
        session_dir_mib=args.session_dir_mib,
    )


def in_flags(error: Exception, args: argparse.Namespace) -> str:
    """Return what is wrong with the options, each called as the flag that sets it."""
    text = str(error)
    for name in vars(args):
        # A word of everyday use is an option only where the sentence is about it.
        option = rf"(?<!\S){name}(_s|_bytes)?(?=[ ,]|$)" if "_" in name else rf"^{name}(?= is )"
        text = re.sub(option, f"--{name.replace('_', '-')}", text)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("llm_engine").setLevel(logging.INFO)
    # While it loads: what Python's own handler raises inside llama.cpp's log callback would be lost.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with Engine.spawn(engine_config(args, session_ttl=args.session_ttl)) as engine:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return _answer(engine, args)
    except (ConfigError, RequestError) as error:
        print(f"llm-engine: {in_flags(error, args)}", file=sys.stderr)
        return EXIT_FAULT
    except EngineError as error:
        print(f"llm-engine: {error}", file=sys.stderr)
        return EXIT_FAULT
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llm-engine", description="Generate one answer with a GGUF model, printing tokens as they come."
    )
    add_version_flag(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the user's message")
    parser.add_argument("--system", metavar="TEXT", help="a system message before it")
    parser.add_argument(
        "--think", action="store_true", help="let the model reason first, if its template can"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="tokens to generate (default: the room left, at most 4096)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 is greedy (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="makes an answer repeatable (default: random)")
    add_engine_flags(parser)
    add_session_ttl_flag(parser)
    return parser


def _request(args: argparse.Namespace) -> GenerateRequest:
    system = ({"role": "system", "content": args.system},) if args.system else ()
    return GenerateRequest(
        messages=(*system, {"role": "user", "content": args.prompt}),
        max_tokens=args.max_tokens,
        sampling=SamplingParams(temperature=args.temperature, seed=args.seed),
        think=args.think,
    )


def _answer(engine: Engine, args: argparse.Namespace) -> int:
    try:
        return _print_answer(engine.submit(_request(args)))
    except OSError as error:
        # The interpreter must not meet the same pipe or full disk again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # whoever read the answer has enough
            return EXIT_BROKEN_PIPE
        print(f"llm-engine: the answer cannot be written: {error.strerror}", file=sys.stderr)
        return EXIT_FAULT


def _print_answer(generation: Generation) -> int:
    for event in generation:
        match event:
            case Delta(text):
                print(text, end="", flush=True)
            case Finished() as end:
                print()
                print(_summary(end), file=sys.stderr)
            case Failed(error):
                print()
                raise error
    return 0


def _summary(end: Finished) -> str:
    rate = 1000 * (end.n_completion - 1) / end.decode_ms if end.decode_ms else 0.0
    return (
        f"[{end.n_prompt} prompt tokens in {end.prefill_ms:.0f} ms, "
        f"{end.n_completion} generated at {rate:.1f} tok/s, {end.reason}]"
    )


if __name__ == "__main__":
    sys.exit(main())
