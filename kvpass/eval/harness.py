"""Tasks of lm-evaluation-harness over a packed cache: a model for the harness, and a comparison of schemes.

Needs the package lm_eval, which nothing else here imports.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.api.task import Task
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import api
from ..errors import KVPassError
from ..fields import shown
from .likelihood import likelihoods
from .quality import packed
from .size import Scheme

_Z95 = 1.96


@register_model("kvpass")
class PackedLM(HFLM):  # type: ignore[misc]
    """The harness's model of transformers, whose likelihoods read the context from the model's cache
    (`kvpass.eval.likelihood`). Tasks that generate do so with ``HFLM``, too.

    pretrained: a name or a model, as ``HFLM`` takes it.
    scheme: what `kvpass.apply` takes; None leaves the model as it is, applied or not.
    token_by_token: see `likelihoods`. Rolling likelihoods need it, because their context is a single token.
    options: those of ``HFLM``; ``batch_size`` counts answers to one question.

    Raises `KVPassError` for encoder-decoders, for ``batch_size="auto"``, and if several processes share the work.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        scheme: Scheme | str = None,
        token_by_token: bool = False,
        lowering: str = "eager",
        **options: Any,
    ):
        super().__init__(pretrained, **options)
        if self.backend != "causal" or self.world_size > 1 or self.batch_size == "auto":
            raise KVPassError(
                "Likelihoods over a packed cache need a decoder, a single process and a number as batch_size."
            )
        self.token_by_token = token_by_token
        if scheme is not None:
            api.apply(self.model, scheme, lowering=lowering)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        if not self.token_by_token:
            raise KVPassError(
                "A rolling likelihood scores a whole text after a single token, so one call would read nothing from "
                "the packed cache: pass token_by_token=True, or measure perplexity with python -m kvpass eval."
            )
        found: list[float] = super().loglikelihood_rolling(requests, disable_tqdm)
        return found

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        tokens = []
        for _, context, continuation in requests:
            whole = (context + continuation)[-(self.max_length + 1) :]
            cut = len(whole) - len(continuation)
            tokens.append((whole[:cut], whole[cut:]))
        with tqdm(total=len(tokens), disable=disable_tqdm, desc="likelihoods") as bar:
            batch, one_by_one = override_bs or int(self.batch_size), self.token_by_token
            found = likelihoods(self.model, tokens, batch=batch, token_by_token=one_by_one, done=bar.update)
        answers = [(each.total, each.greedy) for each in found]
        for (pair, _, _), answer in zip(requests, answers, strict=True):
            if pair is not None:
                self.cache_hook.add_partial("loglikelihood", pair, answer)
        return answers


@dataclass(frozen=True)
class TaskScore:
    """One scheme on one task.

    metrics: name -> the harness's figure; errors: name -> its standard error.
    items: metric -> its value for each question, in one order for all schemes.
    totals: for tasks that rank answers, the log-likelihood of each answer of each question, in nats.
    """

    task: str
    scheme: str
    metrics: dict[str, float]
    errors: dict[str, float]
    items: dict[str, tuple[float, ...]]
    totals: tuple[tuple[float, ...], ...] = ()

    @property
    def choices(self) -> list[int]:
        """The most likely answer of each question."""
        return [max(range(len(each)), key=each.__getitem__) for each in self.totals]

    def changed(self, other: "TaskScore") -> int:
        """How many questions get another most likely answer than from ``other``."""
        return sum(a != b for a, b in zip(self.choices, other.choices, strict=True))

    def shift(self, other: "TaskScore") -> tuple[float, float]:
        """The mean absolute difference of the answers' log-likelihoods from those of ``other``, in nats, and half the
        width of its 95 % interval, by question."""
        each = [
            statistics.fmean(abs(x - y) for x, y in zip(a, b, strict=True))
            for a, b in zip(self.totals, other.totals, strict=True)
        ]
        spread = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.inf
        return statistics.fmean(each), _Z95 * spread

    def gain(self, other: "TaskScore", metric: str) -> tuple[float, float]:
        """The difference of ``metric`` from ``other``, paired by question, and half the width of its 95 % interval."""
        each = [a - b for a, b in zip(self.items[metric], other.items[metric], strict=True)]
        spread = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.inf
        return statistics.fmean(each), _Z95 * spread


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    schemes: Mapping[str, Scheme],
    *,
    limit: int | None = None,
    shots: int | None = None,
    data: Path | None = None,
    token_by_token: bool = False,
    batch_size: int = 8,
) -> list[TaskScore]:
    """One `TaskScore` per scheme and task; ``model`` is left as it was found.

    tasks: names of the harness's tasks.
    schemes: name -> what `kvpass.apply` takes; None is full precision.
    limit: questions per task, the first ones; None for all.
    shots: examples before each question; None for the task's own number.
    data: a folder with ``TASK.jsonl`` for each task, in the columns of its data set on the hub, which is not read.
        Examples are then taken from the same file, without the question itself.
    batch_size: answers to one question that are scored, or questions that are generated from, in one call. Shorter
        prompts of a call are padded.

    Raises `KVPassError` for an unknown task, and if ``data`` lacks a file.
    """
    loaded, scores = _tasks(tasks, data), []
    for name, scheme in schemes.items():
        with packed(model, scheme, **({} if scheme is None else {"lowering": "eager"})):
            harness = PackedLM(model, tokenizer=tokenizer, batch_size=batch_size, token_by_token=token_by_token)
            results = simple_evaluate(
                harness, tasks=list(loaded), limit=limit, num_fewshot=shots, bootstrap_iters=0, task_manager=_manager()
            )
        scores += [replace(_score(task, results), scheme=name) for task in tasks]
    return scores


@cache
def _manager() -> TaskManager:
    """Made once: it reads thousands of files."""
    return TaskManager()


def _tasks(tasks: Sequence[str], data: Path | None) -> list[Task]:
    """The tasks, with questions and examples from files of ``data`` if there is such a folder."""
    manager = _manager()
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise KVPassError(f"lm_eval has no task {shown(unknown)}: `lm_eval ls tasks` lists them.")
    if data is None:
        return [manager.load([task])["tasks"][task] for task in tasks]
    if missing := [task for task in tasks if not (data / f"{task}.jsonl").is_file()]:
        raise KVPassError(f"There is no file {missing[0]}.jsonl in {data}: it would hold the questions of that task.")
    with TemporaryDirectory() as folder:
        return [_local(manager, task, data / f"{task}.jsonl", Path(folder)) for task in tasks]


def _local(manager: TaskManager, task: str, questions: Path, folder: Path) -> Task:
    """The task as the harness defines it, but for where its questions come from."""
    config = {
        "include": str(manager.task_index[task].yaml_path),
        "task": task,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"validation": str(questions.resolve())}},
        **dict(training_split=None, validation_split="validation", test_split=None, fewshot_split=None),
    }
    written = folder / f"{task}.yaml"
    written.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    return manager.load([str(written)])["tasks"][task]


def _score(task: str, results: Mapping[str, Any]) -> TaskScore:
    found = {name: value for name, value in results["results"][task].items() if isinstance(value, (int, float))}
    suffix = ",none"
    errors = {
        name.removesuffix(suffix).removesuffix("_stderr"): value
        for name, value in found.items()
        if name.endswith(f"_stderr{suffix}")
    }
    metrics = {name.removesuffix(suffix): value for name, value in found.items() if name.endswith(suffix)}
    metrics = {name: value for name, value in metrics.items() if not name.endswith("_stderr")}
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    items = {name: tuple(float(sample[name]) for sample in samples) for name in metrics if name in samples[0]}
    ranked = isinstance(samples[0]["filtered_resps"][0], (tuple, list))
    totals = tuple(tuple(float(each[0]) for each in sample["filtered_resps"]) for sample in samples) if ranked else ()
    return TaskScore(task, "", metrics, errors, items, totals)
