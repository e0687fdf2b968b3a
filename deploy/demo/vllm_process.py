"""vLLM behind lines of JSON, in a process of its own: prompts in, their tokens and cache hits out."""

import json
import os
import sys
from typing import Any


def main() -> None:
    """Serve the model in argv[1] until the input ends."""
    # vLLM writes to the standard output, and so do its processes: the answers keep it for themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
        max_model_len=2048,
        disable_log_stats=False,
    )
    answers.write("ready\n")
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        params = SamplingParams(
            max_tokens=request["max_tokens"], temperature=0, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        hits = sum(output.num_cached_tokens or 0 for output in outputs)
        answers.write(json.dumps([tokens, hits]) + "\n")


if __name__ == "__main__":
    main()
