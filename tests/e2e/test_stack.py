"""The stack that e2e and chaos suites stand on: its processes serve, suffer what is done to them, and leave nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.stack import Pod, Stack
from tests.support.tiny_model import make_tiny_llama
from tests.support.wait import eventually_sync


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def stack(redis_url: str, model: Path) -> Iterator[Stack]:
    with Stack(redis_url, model, pods=2, workers=2, env={"HEADRACE_SERVED_MODEL_NAME": "tiny"}) as made:
        yield made


def text(pod: Pod) -> str:
    body = {"model": "tiny", "prompt": "Hello world", "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{pod.base_url}/completions", json=body, timeout=60, trust_env=False)
    return str(answer.raise_for_status().json()["choices"][0]["text"])


def test_each_pod_answers_whatever_worker_is_left(stack: Stack) -> None:
    expected = text(stack.pods[0])
    assert text(stack.pods[1]) == expected
    stack.workers[0].kill()
    assert not stack.workers[0].alive
    assert [text(pod) for pod in stack.pods] == [expected] * 2
    stack.workers[0].restart()
    stack.workers[1].terminate()
    assert stack.workers[1].wait() == 0
    assert [text(pod) for pod in stack.pods] == [expected] * 2


def test_a_stopped_process_hangs_until_it_is_continued(stack: Stack) -> None:
    pod = stack.pods[0]
    pod.stop()
    assert not pod.is_ready()
    pod.cont()
    eventually_sync(pod.is_ready, 20, what="the pod answers again")


def test_everything_has_ended_afterwards_hung_or_not(redis_url: str, model: Path) -> None:
    with Stack(redis_url, model) as stack:
        processes = [*stack.workers, *stack.pods]
        for process in processes:
            process.stop()
    assert not any(process.alive for process in processes)


def test_a_process_that_cannot_start_fails_the_test_with_its_log(redis_url: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="worker-0 ended with code 2") as failure:
        Stack(redis_url, tmp_path / "no-model-here").__enter__()
    assert "no-model-here" in "".join(failure.value.__notes__)
