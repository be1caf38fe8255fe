"""The engine: load a model, submit requests, read their events.

Owns: the step thread and the count of what is in flight. This is the only module where threads meet, in two
places: `submit`, the handles and the disk put commands on the loop's queue; the step thread delivers the
events of a call of llama.cpp with one ring at the door of each event loop.
"""

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Self
from weakref import WeakKeyDictionary

from llm_engine import gguf, llama
from llm_engine.backend import Backend, LlamaBackend, context_params
from llm_engine.budget import Budget
from llm_engine.config import EngineConfig, count_cores
from llm_engine.diskcache import DiskCache, Outcome
from llm_engine.diskthreads import DiskThreads
from llm_engine.doorbell import Doorbell
from llm_engine.errors import (
    ConfigError,
    EngineBusy,
    EngineClosed,
    PromptTooLong,
    RequestError,
    TemplateRefused,
)
from llm_engine.footprint import Footprint
from llm_engine.generation import (
    Control,
    Delta,
    GenerateRequest,
    Generation,
    Listener,
    Mail,
    Mailbox,
    Prepared,
)
from llm_engine.gguf import ModelFile
from llm_engine.header import check_header
from llm_engine.info import Capacity, EngineInfo, Kept
from llm_engine.layout import measure
from llm_engine.loop import Cancel, Close, Disk, Loop, SetPaused, Start
from llm_engine.memory import available_bytes
from llm_engine.model import Model, fingerprint, model_params
from llm_engine.sampling import Sampler
from llm_engine.scheduler import Addressed, Scheduler
from llm_engine.sequence import Sequence
from llm_engine.sessiondir import SessionDir, make_session_dir
from llm_engine.slots import Slots
from llm_engine.store import Store
from llm_engine.text import TextAssembler
from llm_engine.trial import try_load

logger = logging.getLogger(__name__)

DISK_CLOSE_S = 1.0  # for what the disk is in the middle of


class Engine:
    """A resident model and its step thread. Thread: every method may be called from any thread."""

    def __init__(self, model: Model, backend: Backend, config: EngineConfig, info: EngineInfo) -> None:
        self.info = info
        self._fault: Exception | None = None
        self._model = model
        self._config = config
        self._count = threading.Condition()
        self._n_inflight = 0
        self._n_preparing = 0
        self._closed = False
        self._doorbells: WeakKeyDictionary[asyncio.AbstractEventLoop, Doorbell[Mail]] = WeakKeyDictionary()
        self._watch: tuple[asyncio.AbstractEventLoop, Callable[[], None]] | None = None
        self._disk_threads: DiskThreads | None = None
        self._slots = Slots(
            config.n_slots,
            backend,
            Store(config.cache_ram_mib << 20, self._open_disk()),
            is_end_of_turn=model.is_end_of_generation,
            reuses=config.cache_prompt,
            ttl_s=config.session_ttl or None,
        )
        scheduler = Scheduler(self._slots, model, config.prompt_slice)
        budget = Budget(
            config.batch_size, info.max_inflight, target_s=config.target_step_s, chunk=config.prefill_chunk
        )
        self._loop = Loop(backend, self._slots, scheduler, budget, self._deliver, self._tell_watcher)
        self._thread = threading.Thread(target=self._run, name="llm-engine-step", daemon=True)
        self._thread.start()

    @classmethod
    def spawn(cls, config: EngineConfig) -> Self:
        """Load the model; returns when it is resident.

        Raises: ModelError naming the file and the reason, DoesNotFit before anything large is allocated,
        ConfigError for a directory that cannot be used, or a GPU that is not there.
        """
        _check_machine(config)
        if config.session_dir is not None:
            make_session_dir(config.session_dir)
        file = gguf.resolve(config.model, url=config.model_url, download=config.download)
        for part in file.parts:
            check_header(part)
        try_load(file.path)
        footprint = measure(file.path, config)
        config = fitted(config, footprint, available_bytes())
        model = Model.load(file.path, model_params(config))
        info = _describe(model, file, config, footprint.n_ctx)
        backend = LlamaBackend.create(model, context_params(config, info.n_ctx), info.fingerprint)
        return cls(model, backend, config, info)

    def prepare(self, request: GenerateRequest) -> Prepared:
        """Template and tokenise a request, and clamp its `max_tokens` to the room left.

        Raises: PromptTooLong, TemplateRefused, another RequestError, EngineClosed.
        """
        with self._model_in_use() as model:
            if model.template is None:
                raise TemplateRefused(f"{self.info.file} carries no chat template")
            segments = _encodable(model.template.render(request.messages, request.think))
            if (n_at_least := model.n_tokens_at_least(segments)) > self.info.n_ctx:
                raise PromptTooLong(n_at_least, self.info.n_ctx)
            prompt = model.tokenize(segments)
            if not prompt:
                raise RequestError("the prompt is empty: the chat template makes nothing of the messages")
            if not all(0 <= token < model.n_vocab for token in request.resumed):
                raise RequestError("resumed holds a token that this model does not have")
        room = self.info.n_ctx - len(prompt)
        if room < max(1, len(request.resumed)):
            raise PromptTooLong(len(prompt) + len(request.resumed), self.info.n_ctx)
        wanted = request.max_tokens or self._config.max_tokens
        return Prepared(request=request, prompt=tuple(prompt), max_tokens=min(wanted, room))

    def submit(self, request: GenerateRequest | Prepared, on_event: Listener | None = None) -> Generation:
        """Admit a request and start it, or queue it when every slot is taken.

        With `on_event` its events go there, on the running event loop; without, iterate the handle.

        Raises: EngineBusy with the waiting list full, EngineClosed, and what `prepare` raises.
        """
        prepared = request if isinstance(request, Prepared) else self.prepare(request)
        assert prepared.prompt, "an empty prompt, which `prepare` refuses"
        mailbox = Mailbox(self._doorbell(), on_event)
        sequence = _sequence(mailbox, prepared)
        with self._count:
            if self._closed:
                raise EngineClosed("the engine takes no more requests")
            if self._n_inflight >= self.info.max_inflight + self._config.max_waiting:
                raise EngineBusy(f"{self._n_inflight} requests are in flight")
            self._n_inflight += 1
            self._loop.commands.put(Start(sequence))
        return Generation(mailbox, self._control)

    @property
    def fault(self) -> Exception | None:
        """What ended the engine before it was closed; None as long as it works."""
        return self._fault

    def capacity(self) -> Capacity:
        """How busy the engine is now."""
        stats, inflight = self._loop.stats, self._n_inflight
        running, kept = self._slots.running, self.kept()
        return Capacity(
            inflight=inflight,
            decoding=stats.n_decoding,
            max_inflight=self.info.max_inflight,
            n_admissible=0 if self._closed else stats.n_admissible,
            step_ms=stats.step_ms,
            step_age_s=time.monotonic() - stats.ended_at if stats.ended_at else 0.0,
            kv_promised_tokens=stats.kv_promised_tokens,
            tokens_per_second=stats.tokens_per_second,
            prompt_tokens_per_second=stats.prompt_tokens_per_second,
            n_sessions=running.n_sessions + kept.slots.n_sessions + kept.host.n_sessions,
            kv_bytes=running.n_bytes + kept.slots.n_bytes + kept.host.n_bytes,
            kv_promised_bytes=self._slots.n_bytes_of(running.n_sessions, stats.kv_promised_tokens),
        )

    def kept(self) -> Kept:
        """What lies where for next turns."""
        store = self._slots.store
        return Kept(slots=self._slots.tier, host=store.host.tier, disk=store.disk.tier)

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` on the running event loop when step times or the end of a generation change it."""
        self._watch = (asyncio.get_running_loop(), on_change)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take nothing new and wait for what runs; False if some still did after `timeout_s`."""
        with self._count:
            self._closed = True
            return self._count.wait_for(lambda: self._n_inflight == 0, timeout_s)

    def close(self, *, keep_sessions: bool = True) -> None:
        """Fail what still runs with EngineClosed and free the model. Idempotent.

        What is kept for next turns goes to the session directory, if there is one, for five seconds at most.
        """
        with self._count:
            self._closed = True
        self._loop.commands.put(Close(keep_sessions))
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _run(self) -> None:
        """Step until closed; a fault of the loop itself ends the engine, not its callers' patience."""
        try:
            self._loop.run()
        except Exception as error:
            logger.exception("the step loop failed: the engine has ended")
            self._fault = error
        with self._count:
            self._closed = True
        self._loop.end()
        if self._disk_threads is not None:
            self._disk_threads.close(DISK_CLOSE_S)
        with self._count:
            self._count.wait_for(lambda: self._n_preparing == 0)
        self._model.close()

    @contextmanager
    def _model_in_use(self) -> Iterator[Model]:
        """Keep the model from being freed under another thread."""
        with self._count:
            if self._closed:
                raise EngineClosed("the engine takes no more requests")
            self._n_preparing += 1
        try:
            yield self._model
        finally:
            with self._count:
                self._n_preparing -= 1
                self._count.notify_all()

    def _doorbell(self) -> Doorbell[Mail] | None:
        """That of the calling thread's event loop."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return None
        if loop not in self._doorbells:
            self._doorbells[loop] = Doorbell(loop, _put_all)
        return self._doorbells[loop]

    def _control(self, mailbox: Mailbox, control: Control) -> None:
        match control:
            case Control.CANCEL:
                self._loop.commands.put(Cancel(mailbox))
            case Control.PAUSE:
                self._loop.commands.put(SetPaused(mailbox, True))
            case Control.RESUME:
                self._loop.commands.put(SetPaused(mailbox, False))

    def _open_disk(self) -> DiskCache:
        """What the directory holds for this model, and threads to read and write it; nothing without one.

        Raises: ConfigError.
        """
        config = self._config
        if config.session_dir is None:
            return DiskCache()
        folder = SessionDir.take(config.session_dir, self.info.fingerprint, config.session_ttl or None)
        self._disk_threads = DiskThreads(folder, self._disk_did)
        return DiskCache(config.session_dir_mib << 20, self._disk_threads.order, folder.found())

    def _disk_did(self, outcome: Outcome) -> None:
        """Thread: those of the disk."""
        self._loop.commands.put(Disk(outcome))

    def _tell_watcher(self) -> None:
        """Tell who watches that `capacity` has changed. Thread: step thread."""
        if self._watch is not None:
            loop, on_change = self._watch
            if not loop.is_closed():
                loop.call_soon_threadsafe(on_change)

    def _deliver(self, events: list[Addressed]) -> None:
        """Hand events over. Thread: step thread."""
        by_door: dict[Doorbell[Mail] | None, Mail] = {}
        for mailbox, event in events:
            assert isinstance(mailbox, Mailbox)
            by_door.setdefault(mailbox.doorbell, []).append((mailbox, event))
        for doorbell, mail in by_door.items():
            if doorbell is None:
                _put_all(mail)
            else:
                doorbell.put(mail)
        n_ended = sum(not isinstance(event, Delta) for _, event in events)
        if n_ended:
            with self._count:
                self._n_inflight -= n_ended
                self._count.notify_all()
            self._tell_watcher()  # nobody hears the last event of what was cancelled


def _put_all(mail: Mail) -> None:
    """Deliver to each; one that raises does not keep the others from theirs."""
    for mailbox, event in mail:
        try:
            mailbox.put(event)
        except Exception:
            logger.exception("a listener failed on %s", type(event).__name__)


def _encodable(segments: tuple[str, ...]) -> tuple[str, ...]:
    """The segments, if they are text. Raises: RequestError for half a surrogate pair."""
    try:
        "".join(segments).encode()
    except UnicodeEncodeError as error:
        raise RequestError("the messages hold half a surrogate pair, which is no text") from error
    return segments


def _sequence(mailbox: Mailbox, prepared: Prepared) -> Sequence:
    request = prepared.request
    seed = request.sampling.seed
    return Sequence(
        key=mailbox,
        tokens=[*prepared.prompt, *request.resumed],
        n_prompt=len(prepared.prompt),
        max_tokens=prepared.max_tokens,
        sampler=Sampler(
            request.sampling,
            seed=random.getrandbits(63) if seed is None else seed,
            choice=request.choice,
            prompt=prepared.prompt,
        ),
        text=TextAssembler(request.stop),
    )


def _check_machine(config: EngineConfig) -> None:
    """Refuse what is not there, and warn of what will be slow, which llama.cpp takes without a word.

    Raises: ConfigError.
    """
    if config.n_gpu_layers and not llama.has_gpu():
        raise ConfigError(f"n_gpu_layers is {config.n_gpu_layers}: this build of llama.cpp finds no GPU")
    if config.n_threads > (n_cores := count_cores()):
        logger.warning("%d compute threads on %d cores will wait for each other", config.n_threads, n_cores)


def fitted(config: EngineConfig, footprint: Footprint, free_bytes: int) -> EngineConfig:
    """Say what the engine will take; the options with a prefix cache of half of what it leaves, at most.

    Raises: DoesNotFit.
    """
    room_mib = footprint.room_left(free_bytes) >> 20
    cache_mib = min(config.cache_ram_mib, room_mib // 2) if config.cache_prompt else 0
    logger.info("%s", footprint.summary(cache_bytes=cache_mib << 20, free_bytes=free_bytes))
    return replace(config, cache_ram_mib=cache_mib)


def _describe(model: Model, file: ModelFile, config: EngineConfig, n_ctx: int) -> EngineInfo:
    settings = (
        *(n_ctx, config.flash_attn, config.type_of_keys, config.cache_type_v, config.prompt_slice),
        config.n_gpu_layers != 0,
    )
    return EngineInfo(
        name=file.name,
        aliases=file.aliases,
        file=file.shown,
        n_params=model.n_params,
        n_ctx=n_ctx,
        n_ctx_train=model.n_ctx_train,
        max_inflight=config.n_slots,
        fingerprint=fingerprint(file.parts, *settings),
    )
