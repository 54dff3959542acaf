# SPDX-License-Identifier: Apache-2.0
"""The error of a request that cannot be done, and checks of a user's words."""

from sparse_lavida_jax.schema import InputError


class RequestError(InputError):
    """A request for something that a model cannot do; the message says what it can."""


def check_words(text: str) -> str:
    """Checks a text that a user wrote, and returns it.

    Raises:
        RequestError: it is empty, or `check_characters` refuses it.
    """
    if not text.strip():
        raise RequestError("the prompt is empty: say in words what you want.", setting="prompt")
    check_characters(text, "prompt")
    return text


def check_characters(text: str, what: str) -> None:
    """Checks that a text can be encoded.

    Raises:
        RequestError: it holds half a character (a surrogate), which JSON and command-line
            arguments may contain.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"character {error.start + 1} of the {what} is half a character: leave it out.",
            setting=what,
        ) from error


def too_long(text: str, tokens: int, most: int, what: str = "prompt") -> RequestError:
    """Returns the error for a prompt that is longer than the model allows."""
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    return RequestError(
        f"the {what} {shown!r} is {tokens} tokens long, images included: at most {most} fit.",
        setting=what,
    )
