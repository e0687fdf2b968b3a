"""Imports vLLM, which warns as it is imported: in the process that engines are forked from, or in a test."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.engine.arg_utils
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker
    import vllm.v1.worker.utils  # noqa: F401
