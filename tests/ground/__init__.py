"""The ground: stands up the real things that Rota is tested, shown and measured against.

`python -m ground up` starts them for a person, `ground.fixtures` for pytest. One *instance* is one standing ground;
several can stand side by side, because each has its own folder and its own block of loopback addresses.

    report      what is said to people: progress lines, and `Missing`, the one-sentence error
    cache       what survives between runs: programs, jars, images; built once, under a lock
    programs    where each program comes from: the user's, or built from its Go module
    instance    a folder, an address block, and processes that can always be found and ended
    keys, api   certificates; the API server over HTTP
    controlplane, local, node, rocketmq, prometheus, kwok    the real things
"""
