"""Connectionist temporal classification: beam search decoding."""

from __future__ import annotations

from typing import Dict, List, Tuple

import torch

from ipurun.emulator._impl import createPoptorchError
from ipurun.emulator._ops.recording import active_recorder, call_recorded, require_tensor

Prefix = Tuple[int, ...]


def ctc_beam_search_decoder(
    probs: torch.Tensor, lengths: torch.Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> List[torch.Tensor]:
    """Find the most likely label sequences of CTC outputs.

    Args:
        probs: Log-probabilities, [input length, batch, classes].
        lengths: Valid steps of each sample, [batch].
        blank: Class that means "no label".
        beam_width: Prefixes kept at each step.
        top_paths: Sequences returned per sample.

    Returns:
        Log-probabilities [batch, top_paths], lengths [batch, top_paths] and labels [batch, top_paths, input
        length], filled up with `blank`. Outside an executor zeros of these shapes, as in PopTorch.

    Raises:
        poptorch.Error: `probs` is not a tensor of three dimensions, or `lengths` not a tensor.
    """
    require_tensor(probs, "ctc_beam_search_decoder: probs")
    require_tensor(lengths, "ctc_beam_search_decoder: lengths")
    if probs.dim() != 3:
        raise createPoptorchError(
            f"ctc_beam_search_decoder: probs must have 3 dimensions [input length, batch, classes], got {probs.dim()}."
        )
    recorder = active_recorder()
    if recorder is None:
        steps, batch, _ = probs.shape
        return [
            torch.zeros(batch, top_paths),
            torch.zeros(batch, top_paths, dtype=torch.int32),
            torch.zeros(batch, top_paths, steps, dtype=torch.int32),
        ]

    def decode(values: torch.Tensor, valid_steps: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        return _decode_batch(values, valid_steps, blank, beam_width, top_paths)

    return list(call_recorded(recorder, decode, [probs, lengths], name="ctc_beam_search_decoder"))


def _decode_batch(
    probs: torch.Tensor, lengths: torch.Tensor, blank: int, beam_width: int, top_paths: int
) -> Tuple[torch.Tensor, ...]:
    steps, batch, _ = probs.shape
    scores = torch.full((batch, top_paths), float("-inf"), dtype=torch.float32)
    path_lengths = torch.zeros(batch, top_paths, dtype=torch.int32)
    paths = torch.full((batch, top_paths, steps), blank, dtype=torch.int32)
    for sample in range(batch):
        valid = probs[: int(lengths[sample]), sample].to(torch.float32)
        for rank, (score, prefix) in enumerate(_search(valid, blank, beam_width)[:top_paths]):
            scores[sample, rank] = score
            path_lengths[sample, rank] = len(prefix)
            paths[sample, rank, : len(prefix)] = torch.tensor(prefix, dtype=torch.int32)
    return scores.to(probs.dtype), path_lengths, paths


def _search(probs: torch.Tensor, blank: int, beam_width: int) -> List[Tuple[float, Prefix]]:
    """Return the label sequences that survive all steps, best first, with their log-probabilities.

    A prefix has two scores, for alignments that end in a blank and for those that end in its last label:
    only after a blank does the same label again make the prefix longer.
    """
    prefixes: List[Prefix] = [()]
    ends_blank = torch.zeros(1)
    ends_label = torch.full((1,), float("-inf"))
    num_classes = probs.shape[1]

    for step in probs:
        total = torch.logaddexp(ends_blank, ends_label)
        # The empty prefix has no last label; the blank stands in, and its label score is -inf anyway.
        last = torch.tensor([prefix[-1] if prefix else blank for prefix in prefixes])
        rows = torch.arange(len(prefixes))

        longer = total[:, None] + step[None, :]
        longer[rows, last] = ends_blank + step[last]
        longer[:, blank] = float("-inf")
        stay_blank = total + step[blank]
        stay_label = ends_label + step[last]

        index: Dict[Prefix, int] = {prefix: row for row, prefix in enumerate(prefixes)}
        for row, prefix in enumerate(prefixes):
            parent = index.get(prefix[:-1]) if prefix else None
            if parent is not None:
                stay_label[row] = torch.logaddexp(stay_label[row], longer[parent, prefix[-1]])
                longer[parent, prefix[-1]] = float("-inf")

        candidates = torch.cat([torch.logaddexp(stay_blank, stay_label), longer.flatten()])
        best = [place for place in _best(candidates, beam_width) if candidates[place] > float("-inf")]
        kept: List[Tuple[Prefix, float, float]] = []
        for place in best:
            if place < len(prefixes):
                kept.append((prefixes[place], float(stay_blank[place]), float(stay_label[place])))
            else:
                row, label = divmod(place - len(prefixes), num_classes)
                kept.append((prefixes[row] + (label,), float("-inf"), float(longer[row, label])))
        prefixes = [prefix for prefix, _, _ in kept]
        ends_blank = torch.tensor([score for _, score, _ in kept])
        ends_label = torch.tensor([score for _, _, score in kept])

    total = torch.logaddexp(ends_blank, ends_label)
    return [(float(total[place]), prefixes[place]) for place in _best(total, len(prefixes))]


def _best(scores: torch.Tensor, count: int) -> List[int]:
    return torch.topk(scores, min(count, scores.numel())).indices.tolist()
