"""Write text with a run of the gpt recipe: ``python -m ipurun.recipes.gpt.sample RUN --prompt "Alice"``."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Callable, Iterator, List, Optional, Sequence

import torch
from torch import nn

from ipurun import engine as engines
from ipurun.errors import ConfigError, IpurunError
from ipurun.interface import load
from ipurun.recipes.gpt.dataset import CHARACTERS, decode, encode

__all__ = ["NextToken", "generate", "main", "next_scores"]


class NextToken(nn.Module):
    """A decoder that returns the scores of one position only: all of them would be copied to the host for nothing.

    Args:
        model: The decoder.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        scores = self.model(tokens)
        # A sum over a mask rather than an index, which an IPU computes with a slow gather.
        chosen = torch.arange(tokens.shape[1]) == position.reshape(-1, 1)
        return (scores * chosen.unsqueeze(-1).to(scores.dtype)).sum(dim=1)


def next_scores(model: nn.Module, engine: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the executor of an engine for a decoder: compiled once, for windows of the model's whole length."""
    options = engine.module.Options()
    return engine.module.inferenceModel(NextToken(model).eval(), options)


def generate(
    scores_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    prompt: Sequence[int],
    length: int,
    window: int,
    *,
    temperature: float = 0.8,
    top_k: Optional[int] = None,
    seed: int = 0,
) -> Iterator[int]:
    """Yield tokens that continue a prompt.

    Every call has the same shape, as an IPU needs: what is written so far fills a window from the left, and padding
    after it, which a decoder does not see, fills the rest. A longer text is seen through its last tokens.

    Args:
        scores_of: Tokens (1 x window) and a position (1) -> the scores of the token after it.
        prompt: The first tokens, at least one.
        length: Number of tokens to write.
        window: Tokens per window.
        temperature: Divides the scores: above 1 for more variety; 0 always takes the best token.
        top_k: Draw from this many of the best tokens; None: from all.
        seed: Seed of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    written: List[int] = list(prompt)
    for _ in range(length):
        seen = written[-window:]
        tokens = torch.tensor([seen + [0] * (window - len(seen))])
        scores = scores_of(tokens, torch.tensor([len(seen) - 1]))[0].float()
        if temperature == 0:
            token = int(scores.argmax())
        else:
            if top_k is not None:
                scores = scores.masked_fill(scores < scores.topk(min(top_k, len(scores))).values[-1], -torch.inf)
            token = int(torch.multinomial(torch.softmax(scores / temperature, dim=0), 1, generator=generator))
        written.append(token)
        yield token


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Write text to standard output, character by character."""
    parser = argparse.ArgumentParser(prog="python -m ipurun.recipes.gpt.sample", description=__doc__)
    parser.add_argument("run", help="run folder of the gpt recipe")
    parser.add_argument("--prompt", default="\n", help="text to continue; default: a new line")
    parser.add_argument("--length", type=int, default=400, help="characters to write; default: 400")
    parser.add_argument("--temperature", type=float, default=0.8, help="variety; 0: always the likeliest; default: 0.8")
    parser.add_argument("--top-k", type=int, help="draw from this many of the likeliest characters")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    parser.add_argument("--best", action="store_true", help="the best checkpoint instead of the newest")
    parser.add_argument("--checkpoint", help="another checkpoint of the run")
    parser.add_argument("--engine", default="auto", choices=("auto", "cpu", "ipu", "ipu_model"))
    given = parser.parse_args(argv)
    try:
        _check(given)
        loaded = load(given.run, given.checkpoint, given.best)
        size = loaded.config.model.get("vocab_size")
        if size != len(CHARACTERS):
            fix = "use the tokenizer that made its data, with `generate` of this module"
            raise ConfigError(f"the run's model knows {size} tokens, not the {len(CHARACTERS)} characters", fix=fix)
        scores_of = next_scores(loaded.model, engines.load(given.engine))
        sys.stdout.write(given.prompt)
        window = int(loaded.config.model["max_positions"])
        choices = {"temperature": given.temperature, "top_k": given.top_k, "seed": given.seed}
        for token in generate(scores_of, encode(given.prompt).tolist(), given.length, window, **choices):
            sys.stdout.write(decode(torch.tensor([token])))
            sys.stdout.flush()
        sys.stdout.write("\n")
    except IpurunError as error:
        sys.stderr.write("\n\n".join(map(str, error.problems)) + "\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return 130
    return 0


def _check(given: argparse.Namespace) -> None:
    wrong = {
        "--prompt": not given.prompt,
        "--length": given.length < 1,
        "--temperature": not given.temperature >= 0,
        "--top-k": given.top_k is not None and given.top_k < 1,
    }
    found = [flag for flag, is_wrong in wrong.items() if is_wrong]
    if found:
        value = getattr(given, found[0].lstrip("-").replace("-", "_"))
        raise ConfigError(f"`{found[0]}` cannot be `{value}`", "command line", fix=f"{found[0]} with a larger value")


if __name__ == "__main__":
    raise SystemExit(main())
