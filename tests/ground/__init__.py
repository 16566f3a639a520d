"""The ground: starts the real parts that Rota is tested, demonstrated and measured on.

`python -m ground up` starts them for interactive use, `ground.fixtures` for pytest. One *instance* is one running
ground; several can run at the same time, because each has its own folder and its own block of loopback addresses.

    report      messages to the user: progress lines, and `Missing`, the one-sentence error
    cache       files that outlive a run: programs, jars, images; built once, under a lock
    programs    where each program comes from: the user's, or built from its Go module
    instance    a folder, an address block, and processes that can always be found and ended
    keys, api   certificates; the API server over HTTP
    controlplane, local, node, rocketmq, prometheus, kwok    the real parts
"""
