"""The stand-in's tensor, sequence and context parallelism equals the whole layer, forward and backward."""

import pytest
from standin_package import run_ranks

CHECKS = (
    "column_with_sequence_parallelism",
    "column_without_sequence_parallelism",
    "norm_output_gathered",
    "row_with_sequence_parallelism",
    "row_without_sequence_parallelism",
    "context_parallel_packed",
    "context_parallel_unpacked",
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return run_ranks(CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks_equal_one(check: str, outputs: list[str]) -> None:
    for rank, output in enumerate(outputs):
        assert f"passed {check}" in output, f"rank {rank}:\n{output}"
