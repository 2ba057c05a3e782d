"""Rows of LongBench for `python -m kvpass tasks --data FOLDER`, where the hub cannot be reached.

    git clone https://github.com/MilkThink-Lab/MiniLongBench
    python benchmarks/longbench_rows.py MiniLongBench FOLDER --tasks lcc,samsum

MiniLongBench (arXiv 2505.19959) chose 237 rows of LongBench that rank models as all of its rows do. Its repository has
their prompts beside predictions for them; the harness's templates tell which part of a prompt is the context.
"""

import argparse
import json
import re
from pathlib import Path

import yaml
from lm_eval.tasks import TaskManager

PROMPTS = "pred_data/example/MiniLongBench_{}.json"


class _Loader(yaml.SafeLoader):
    """Reads the harness's tasks without the functions that they name."""


_Loader.add_multi_constructor("!function", lambda *_: None)


def pattern(template: str) -> re.Pattern[str]:
    """Matches prompts that are made from ``template``."""
    parts = re.split(r"\{\{(context|question)\}\}", template)
    named = [f"(?P<{part}>.*)" if i % 2 else re.escape(part) for i, part in enumerate(parts)]
    return re.compile("".join(named) + r"\s*", re.DOTALL)


def rows(prompts: Path, template: str, characters: int) -> list[dict]:
    """Rows in LongBench's columns, shortest first, with prompts of at most ``characters``."""
    found, made = [], pattern(template)
    for each in json.loads(prompts.read_text(encoding="utf-8")).values():
        prompt, gold = each["origin_prompt"], each["gold"]
        if (match := made.fullmatch(prompt)) is None:
            raise SystemExit(f"{prompts.name} has prompts that the harness does not make: leave this task out.")
        classes = gold if isinstance(gold, dict) else {"answers": gold, "all_classes": None}
        if len(prompt) <= characters:
            found.append({"question": "", **match.groupdict(), **classes})
    return sorted(found, key=lambda row: len(row["context"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a clone of MiniLongBench")
    parser.add_argument("folder", type=Path, help="where longbench_TASK.jsonl is written")
    parser.add_argument("--tasks", default="lcc,samsum", help="separated by commas")
    parser.add_argument("--characters", type=int, default=30000, help="of a prompt at most")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    index = TaskManager().task_index
    for name in args.tasks.split(","):
        task = f"longbench_{name}"
        template = yaml.load(index[task].yaml_path.read_text(encoding="utf-8"), _Loader)["doc_to_text"]
        found = rows(args.source / PROMPTS.format(name), template, args.characters)
        with (args.folder / f"{task}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)
        print(f"{task}: {len(found)} rows")


if __name__ == "__main__":
    main()
