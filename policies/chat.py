"""From messages to tokens, by the tokenizer's own chat template."""
import functools

import numpy as np


class Chat:
    """Turns messages into tokens by the tokenizer's own chat template, appending only: sampled tokens stay as they are.
    With a model's processor instead of a tokenizer, a message may show an image, (H, W, 3) uint8, ahead of its text."""

    MARKER = "assistant-text"

    def __init__(self, processor):
        self.processor, self.tokenizer = processor, getattr(processor, "tokenizer", processor)
        self.image_processor = getattr(processor, "image_processor", None)
        self.specials = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}

    def tokenize(self, text: str, image=None) -> list[int]:
        if image is None:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return list(self.with_placeholders(text, image.shape))

    @functools.lru_cache(4096)
    def with_placeholders(self, text: str, shape: tuple[int, ...]) -> list[int]:
        """The processor makes a sequence of placeholder tokens from the image's one in the text, by the image's size alone."""
        return self.processor(text=text, images=[np.zeros(shape, np.uint8)], add_special_tokens=False)["input_ids"][0]

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def render(self, *contents: str, start: bool = True, image: bool = False) -> str:
        """The template's text of a conversation, user first; `start`: with the head of the next answer; `image`: the last
        message shows one."""
        messages = [{"role": ("user", "assistant")[place % 2], "content": content} for place, content in enumerate(contents)]
        if self.image_processor is not None:
            for message in messages:
                shown = [{"type": "image"}] * (image and message is messages[-1])
                message["content"] = shown + [{"type": "text", "text": message["content"]}]
        return self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=start)

    def opening(self) -> str:
        """"<think>" where the template itself opens the thought that an answer begins with, so that the answer's text has it."""
        return "<think>" if self.render("x").rstrip().endswith("<think>") else ""

    def plain(self, text: str) -> str:
        """A message in which nothing reads as a special token: those are broken by a space."""
        for special in sorted(self.specials, key=lambda special: (-len(special), special)):
            text = text.replace(special, f"{special[:1]} {special[1:]}")
        return text

    def start(self, message: str, image=None) -> list[int]:
        return self.tokenize(self.render(self.plain(message), image=image is not None), image)

    def after_answer(self) -> list[int]:
        """What the template writes after an assistant's text that is the last one."""
        return self.tokenize(self.render("x", self.MARKER, start=False).split(self.MARKER, 1)[1])

    def follow(self, message: str, last_token: int, image=None) -> list[int]:
        """Tokens between an answer that ended in `last_token` and the next one: what the template writes after an
        assistant's text, then the new message. A stop token that was sampled is not written twice."""
        text = self.render("x", self.MARKER, self.plain(message), image=image is not None)
        tokens, after = self.tokenize(text.split(self.MARKER, 1)[1], image), self.after_answer()
        ended = last_token in after and self.tokenizer.convert_ids_to_tokens(last_token) in self.specials
        return tokens[after.index(last_token) + 1:] if ended else tokens

    def stop_ids(self, generation_config=None) -> list[int]:
        """Tokens that end an answer: the tokenizer's and the model's end of text, and the first special one that the template
        writes after an answer."""
        ends = [self.tokenizer.eos_token_id, getattr(generation_config, "eos_token_id", None)]
        ids = {id for end in ends if end is not None for id in (end if isinstance(end, list) else [end])}
        special = [id for id in self.after_answer() if self.tokenizer.convert_ids_to_tokens(id) in self.specials]
        return sorted(ids | set(special[:1]))

    def rewritten_history(self) -> str | None:
        """Why the template does not leave a played conversation as it was sampled, or None if it does."""
        talk = ["x", "<think>\na thought\n</think>\n\nfirst", "y", "second", "z", "<think>\na thought\n</think>\n\nthird", "w"]
        before = self.render("x")
        for played in (3, 5, 7):
            now = self.render(*talk[:played])
            if not now.startswith(before):
                return f"it begins an answer with {before[-40:]!r} and later shows that answer otherwise"
            if not now.startswith(before + talk[played - 2]):
                thinking = "</think>" in talk[played - 2] and "</think>" not in now[len(before):]
                return "it drops the thinking of earlier answers" if thinking else "it shows earlier answers otherwise than given"
            before = now
        return None
