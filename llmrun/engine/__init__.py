"""Prefill, decode step, KV cache, sampler, generate: ids in, events out."""
