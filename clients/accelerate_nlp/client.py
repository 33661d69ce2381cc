"""Accelerate's example for text: an Accelerator wraps the model and divides the batches, and schedules step twice.

The learning rate is written in the script and small, so the embeddings of the tiny model are small as well.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from clients.client import Client

WORDS = [f"word{number}" for number in range(90)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_data(folder: Path) -> None:
    """Where the names that the script asks the hub for are folders here, libraries read those."""
    _make_model(folder / "bert-base-cased")
    glue = folder / "nyu-mll" / "glue"
    (glue / "mrpc").mkdir(parents=True)
    numbers = np.random.default_rng(0)
    splits = {"train": 12 * 32, "validation": 70}
    for split, count in splits.items():
        lines = [json.dumps(_pair(numbers, index)) for index in range(count)]
        (glue / "mrpc" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    files = "".join(f"  - split: {split}\n    path: mrpc/{split}.jsonl\n" for split in splits)
    (glue / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")


def _make_model(folder: Path) -> None:
    import torch
    import transformers  # its models are imported where they are named

    import clients.torchvision_ops  # noqa: F401

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=len(SPECIAL + WORDS), initializer_range=0.3, **sizes)
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    for each in ("word", "position", "token_type"):
        model.get_parameter(f"bert.embeddings.{each}_embeddings.weight").data.mul_(5e-3)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(SPECIAL + WORDS) + "\n")
    transformers.BertTokenizer(str(folder / "vocab.txt"), do_lower_case=False).save_pretrained(folder)


def _pair(numbers: np.random.Generator, index: int) -> dict[str, object]:
    one, other = (" ".join(numbers.choice(WORDS, numbers.integers(4, 12))) for _ in range(2))
    label = int(numbers.integers(2))
    return {"sentence1": one, "sentence2": one if label else other, "label": label, "idx": index}


CLIENT = Client(
    name="accelerate_nlp",
    repository="huggingface/accelerate",
    commit="16cb6eb8",
    command=["examples/nlp_example.py", "--cpu"],
    make_data=make_data,
    environment={"HF_HOME": "hub", "HF_HUB_OFFLINE": "1"},
)
