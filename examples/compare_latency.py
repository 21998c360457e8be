"""Post the same chats to two services in turns, and compare how long they take (pip install requests).

python examples/compare_latency.py [NAME=URL NAME=URL]
"""

import statistics
import sys
import time

import requests

SERVICES = dict(word.split("=", 1) for word in sys.argv[1:]) or {
    "plain": "http://127.0.0.1:8000",
    "fast": "http://127.0.0.1:8001",
}
PROMPTS = ["Name the capital of France.", "Count from one to ten.", "Write a haiku about rain."]
ROUNDS = 3


def ask(name: str, url: str, prompt: str) -> tuple[float, int, str]:
    body = {"model": name, "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 64}
    begun = time.perf_counter()
    response = requests.post(f"{url}/v1/chat/completions", json=body, timeout=300)
    seconds = time.perf_counter() - begun
    response.raise_for_status()
    answer = response.json()
    return seconds, answer["usage"]["completion_tokens"], answer["choices"][0]["message"]["content"]


seconds: dict[str, list[float]] = {name: [] for name in SERVICES}
tokens = dict.fromkeys(SERVICES, 0)
for _ in range(ROUNDS):
    for prompt in PROMPTS:
        answers = set()
        for name, url in SERVICES.items():  # in turns, so that what else the machine does hits both
            taken, count, text = ask(name, url, prompt)
            seconds[name].append(taken)
            tokens[name] += count
            answers.add(text)
        print(f"{prompt!r}: {'the same answer' if len(answers) == 1 else 'answers differ'}")
for name, times in seconds.items():
    print(f"{name:>8}: median {statistics.median(times):.3f} s, {tokens[name] / sum(times):.1f} tokens/s")
