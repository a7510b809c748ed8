"""A callback that lets the model write text at each evaluation."""

from __future__ import annotations

import torch

from ipurun import Callback
from ipurun.recipes.gpt.dataset import CHARACTERS, decode, encode
from ipurun.recipes.gpt.sample import generate
from ipurun.training.events import EvalEnd

__all__ = ["TextSamples"]


class TextSamples(Callback):
    """Writes text to ``samples/step-00000600.txt`` in the run folder, and its first line to the screen.

    The host computes it with a copy of the model, one forward pass for each character: made for small models.

    Args:
        prompt: The text to continue.
        length: Number of characters to write.
        temperature: Variety; 0 always takes the likeliest character.
    """

    def __init__(self, prompt: str = "Alice ", length: int = 120, temperature: float = 0.8) -> None:
        self.prompt = prompt
        self.length = length
        self.temperature = temperature

    def on_eval(self, event: EvalEnd) -> None:
        known = int(self.run.config.model["vocab_size"])
        if known < len(CHARACTERS):
            self.run.note(f"no text is written: there are {len(CHARACTERS)} characters, and the model knows {known}")
            return
        text = self.prompt + self.write(event.step)
        file = self.run.folder / "samples" / f"step-{event.step:08d}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")
        self.run.note(f"text at step {event.step}: {' '.join(text.split())[:80]} ... (all of it in {file})")

    def write(self, seed: int) -> str:
        """Return what the model writes after the prompt."""
        model, window = self.run.plain_model(), int(self.run.config.model["max_positions"])

        def scores_of(tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            # The model may know more tokens than there are characters.
            scores: torch.Tensor = model(tokens)[:, int(position), : len(CHARACTERS)]
            return scores

        prompt = encode(self.prompt).tolist()
        with torch.no_grad():
            written = list(generate(scores_of, prompt, self.length, window, temperature=self.temperature, seed=seed))
        return decode(torch.tensor(written))
