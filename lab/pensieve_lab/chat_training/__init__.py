"""Training of the small chat model, in parts; `programs.train_chat_model` puts them together.

    data, tokenizer                   recorded dialogues; the vocabulary
    wordings, values, frames, facts,  facts that can be told, and their wordings
      kind_families, kinds
    small_talk, recall                greetings and other small talk; conversations around facts, and
                                      tests of remembering them
    examples, corpus, feed            conversations as ids with weights; the mixture; batches
    step, loop, checkpoints           a step on the serving forward pass; many of them; resuming later
    evaluation, export                evaluation of the model; its Hugging Face directory
    served_recall                     the tests again, as the engine serves them (`programs.check_recall`)

Modules import only from earlier rows of this list. No module reads flags or chooses a file; errors name the
flag at fault.
"""
