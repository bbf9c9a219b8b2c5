"""The training of the small chat model, in parts; `programs.train_chat_model` puts them together.

    data, tokenizer                   recorded dialogues; the vocabulary
    wordings, values, frames, facts,  what can be told, and in which words
      kind_families, kinds
    small_talk, recall                greetings and the like; conversations around facts, and tests of
                                      remembering them
    examples, corpus, feed            conversations as ids with weights; the mixture; batches
    step, loop, checkpoints           a step on the serving forward pass; many of them; going on later
    evaluation, export                what was learned; a Hugging Face directory of it
    served_recall                     the tests again, as the engine serves them (`programs.check_recall`)

Imports point up this list, as far as they go. Nothing here reads flags or chooses a file; errors name the
flag that is to blame.
"""
