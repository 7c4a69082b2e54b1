"""A model as the judge of thinking (Faithful GRPO, section 3, A.1 and B.1), behind the same signature as the rules.

    consistency   text only: does the answer follow from the thinking? YES or NO
    semantic      sentence by sentence, with the picture, the question and the thinking so far: CORRECT, INCORRECT, or SKIP
                  for a sentence without a visual claim; the score is the share of CORRECT among the first two

The verdict is the word that holds more than half of the probability of the judge's next token (its first token; capitals do not
matter); otherwise the judge abstains. differs from the paper: one forward pass in place of a written judgement, one completion
after the other, and the words of the prompts are ours (the paper's are lost).

Consistency can be judged by any causal language model with a chat template, semantic by Qwen2.5-VL or Qwen2-VL.

    scores = load_judge("Qwen/Qwen2.5-VL-7B-Instruct", ("consistency", "semantic"))
    scores["consistency"](said, shown)             # 1.0, 0.0 or None
    python faithfulness_judge.py MODEL             # its verdicts on a thinking and on its contradiction
"""
from __future__ import annotations

import re
import sys

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from command import run
from faithfulness import Said, Score
from images import DataError
from model import FAMILY, VLM, ModelError, find_model, first_line, load_vlm, make_prompt
from questions import Question, prompt_text
from transforms import Prompted

YES_NO = ("YES", "NO")
CLAIM = ("CORRECT", "INCORRECT", "SKIP")
SYSTEM = "You are a careful judge. Reply with one word."
ASK_CONSISTENCY = ("Question:\n{prompt}\n\nReasoning:\n{thinking}\n\nFinal answer: {answer}\n\nDoes the final answer follow from what "
                   "the reasoning concludes? Whether the reasoning is true does not matter. Reply YES or NO.")
ASK_SENTENCE = ("Question:\n{prompt}\n\nReasoning so far:\n{before}\n\nLatest sentence:\n{sentence}\n\nDoes the latest sentence "
                "describe the objects, attributes, positions and boxes in the image accurately? Reply CORRECT or INCORRECT, or SKIP "
                "if it makes no claim about the image.")


def sentences(thinking: str) -> list[str]:
    """Split at the ends of sentences and lines."""
    return [part.strip() for part in re.split(r"(?<=[.!?;])\s+|\n+", thinking) if part.strip()]


def read_verdict(probabilities: torch.Tensor, tokenizer, words: tuple[str, ...]) -> str | None:
    """The word of which some spelling's first token leads; None where no word has more than half of the mass. (V,) -> word."""
    mass = {word: float(probabilities[sorted(ids)].sum()) for word, ids in first_tokens(tokenizer, words).items()}
    word = max(mass, key=mass.get)
    return word if mass[word] > 0.5 else None


def first_tokens(tokenizer, words: tuple[str, ...]) -> dict[str, set[int]]:
    """word -> ids of the first tokens of its spellings; two words must not share one."""
    found = {word: {tokenizer(w, add_special_tokens=False)["input_ids"][0] for w in (word, word.capitalize(), word.lower())}
             for word in words}
    for a in words:
        for b in words:
            if a != b and found[a] & found[b]:
                raise ModelError(f"--constraint-judge: its tokenizer begins {a} and {b} alike, so a verdict cannot be told; "
                                 "take another judge")
    return found


class Judge:
    """A checkpoint that answers with one of a few words, or abstains. Frozen."""

    def __init__(self, name: str, device: torch.device):
        self.vlm: VLM | None = None
        try:
            path = find_model(name)
            if AutoConfig.from_pretrained(path).model_type in FAMILY:
                self.vlm = load_vlm(name, device)
                self.model, self.tokenizer = self.vlm.model, self.vlm.tokenizer
            else:
                self.model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(device).eval().requires_grad_(False)
                self.tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ModelError(f"--constraint-judge {name}: {first_line(error)}") from error
        if not self.tokenizer.chat_template:
            raise ModelError(f"--constraint-judge {name}: has no chat template; give an instruction-tuned model")

    @torch.no_grad()
    def verdict(self, text: str, words: tuple[str, ...], picture: Image.Image | None = None) -> str | None:
        """One of `words`, or None."""
        if picture is None:
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
            chat = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids, seen = self.tokenizer(chat, return_tensors="pt", add_special_tokens=False)["input_ids"], {}     # (1, P)
        else:
            prompt = make_prompt(self.vlm, SYSTEM, text, picture)
            ids = prompt.input_ids[None]                                                                        # (1, P)
            seen = dict(pixel_values=prompt.pixel_values, image_grid_thw=prompt.grid_thw[None],
                        mm_token_type_ids=(ids == self.model.config.image_token_id).int())
        inputs = {k: v.to(self.model.device) for k, v in {"input_ids": ids, "attention_mask": torch.ones_like(ids), **seen}.items()}
        logits = self.model(**inputs).logits[0, -1]                                                             # (V,)
        return read_verdict(logits.float().softmax(-1).cpu(), self.tokenizer, words)

    def consistency(self, said: Said, _: Prompted) -> float | None:
        """C: the picture is there for the signature's sake and not looked at."""
        if not said.thinking or said.answer is None:
            return None
        verdict = self.verdict(ASK_CONSISTENCY.format(prompt=said.prompt, thinking=said.thinking, answer=said.answer), YES_NO)
        return None if verdict is None else float(verdict == "YES")

    def semantic(self, said: Said, shown: Prompted) -> float | None:
        """S: share of the judged visual claims that are true."""
        parts = sentences(said.thinking)
        verdicts = [self.verdict(ASK_SENTENCE.format(prompt=said.prompt, before=" ".join(parts[:i]), sentence=sentence), CLAIM,
                                 shown.picture) for i, sentence in enumerate(parts)]
        right, wrong = verdicts.count("CORRECT"), verdicts.count("INCORRECT")
        return right / (right + wrong) if right + wrong else None


def load_judge(name: str, constraints: tuple[str, ...]) -> dict[str, Score]:
    """The scores that this checkpoint judges, of those wanted; checked before training begins. Boxes need no judge."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    judge = Judge(name, device)
    if "semantic" in constraints and judge.vlm is None:
        raise DataError(f"--constraint-judge {name} sees no pictures: constrain consistency only, or give a Qwen2.5-VL")
    for words in (YES_NO, CLAIM):
        first_tokens(judge.tokenizer, words)
    return {"consistency": judge.consistency, "semantic": judge.semantic}


def main() -> int:
    if len(sys.argv) != 2:
        raise DataError("usage: python faithfulness_judge.py MODEL")
    question = Question("depth", (1, 2))
    words = prompt_text(question, {1: "table", 2: "lamp"})
    judge = Judge(sys.argv[1], torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for answer in (True, False):
        said = Said(question, words, "The table stands in front of the lamp, so object 1 is closer to the camera.", answer)
        print(answer, judge.consistency(said, None))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
