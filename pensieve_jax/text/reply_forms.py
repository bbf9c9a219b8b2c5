"""The place of a form in a reply: behind its reasoning, or behind a prefill.

Owns: the rule, for `LLM.chat` and every API.
Does not know: the fields that ask for a form, the grammars of calls, or how masks are made (`text.grammar`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.core.template_input import TemplateInput
from pensieve_jax.text.tokenizer import Tokenizer
from pensieve_jax.text.tool_formats import REASONING_FORMATS


def with_placed_form(
    params: SamplingParams,
    template: TemplateInput,
    prompt_token_ids: Sequence[int],
    tokenizer: Tokenizer | None,
) -> SamplingParams:
    """Return the parameters of a turn with its form, if it has one, in its place; see `placed_form`."""
    if params.structured is None or tokenizer is None:
        return params
    return replace(params, structured=placed_form(params.structured, template, prompt_token_ids, tokenizer))


def placed_form(
    form: StructuredOutput, template: TemplateInput, prompt_token_ids: Sequence[int], tokenizer: Tokenizer
) -> StructuredOutput:
    """Return a form that begins behind the reasoning of a turn's reply, and goes on behind its prefill.

    Reasoning is demanded if the prompt begins it. Otherwise the reply may begin it, as models do that choose
    whether to think. A reply has none if the prompt ends with the mark that ends reasoning, as templates
    write it that are told not to think. A form that says itself what it stands behind stays as it is.
    """
    if form.after or form.prefill:
        return form
    form = replace(form, prefill=template.prefill or "")
    name = template.reply.reasoning
    row = REASONING_FORMATS[name] if name else None
    if row is None or not row.end:
        return form
    if template.prefill is None and tokenizer.ends_with(prompt_token_ids, row.end):
        return form
    return replace(form, after=row.end, opening="" if template.reply.is_open else row.start)
