"""Attention in the processes of Python's multiprocessing, which fork from one that has computed before.

tests/programs.rs runs it: `fork.py LIBRARY EXAMPLES`, with the folder of the examples, whose ctypes it uses.
"""

import array
import multiprocessing
import sys
from ctypes import byref, c_void_p

sys.path.insert(0, sys.argv[2])
import attend  # noqa: E402

HEADS, LENGTH, DIM, PATIENCE = 4, 256, 64, 60
LIBRARY = attend.load(sys.argv[1])


def compute(seed):
    problem, plan = attend.Problem(), c_void_p()
    assert LIBRARY.flashcore_attention_problem_init(byref(problem), 1, HEADS, LENGTH, DIM, attend.DTYPE_F32) == 0
    status = LIBRARY.flashcore_plan_create(byref(problem), attend.DEVICE_CPU, 0, None, byref(plan))
    assert status == 0, LIBRARY.flashcore_last_error()
    size = HEADS * LENGTH * DIM
    query, key, value = (array.array("f", ((i * seed) % step / step for i in range(size))) for step in (13, 7, 5))
    output = array.array("f", [0]) * size
    tensors = attend.tensors(query, key, value, output)
    assert LIBRARY.flashcore_run(plan, *tensors) == 0, LIBRARY.flashcore_last_error()
    assert LIBRARY.flashcore_plan_destroy(plan) == 0
    return output.tobytes()


def main():
    seeds = range(1, 5)
    expected = list(map(compute, seeds))
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(compute, seeds).get(PATIENCE) == expected
    print("the processes of a pool compute")


main()
