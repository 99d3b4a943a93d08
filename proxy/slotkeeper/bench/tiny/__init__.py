"""The recipe of the tiny models: vocabulary, chat template, weights, one builder per architecture.

It needs numpy and gguf (the extra `demo`); `bench.models` is the front.
"""
