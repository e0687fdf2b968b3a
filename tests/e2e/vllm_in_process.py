"""An engine core in its user's process, stepped only while that user waits for tokens.

Arguments: the model's folder and the bytes of KV cache. Each line on stdin is a JSON list of prompts; the
answer is one line with the tokens of each. Or it names a call: sleep, step or wake_up. The end of stdin ends
it.
"""

import json
import sys

from vllm import LLM, SamplingParams

import tests.support.vllm_imports  # noqa: F401
from tests.support.vllm_pages import BLOCK_TOKENS, OUTPUT
from tests.support.vllm_platform import use_fork


def main() -> None:
    use_fork(asynchronous=False)
    llm = LLM(
        sys.argv[1],
        kv_cache_memory_bytes=int(sys.argv[2]),
        block_size=BLOCK_TOKENS,
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=16,
    )
    params = SamplingParams(max_tokens=OUTPUT, temperature=0, detokenize=False, ignore_eos=True)
    print("ready", flush=True)
    calls = {"sleep": llm.sleep, "step": llm.llm_engine.step, "wake_up": llm.wake_up}
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, str):
            calls[asked]()
            print("done", flush=True)
            continue
        prompts = [{"prompt_token_ids": tokens} for tokens in asked]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
