"""OpenAI's routes, branches over HTTP and a live page, over one embedded engine.

    connection  ->  guard (request id, key, log)  ->  route  ->  engine
                                                        └── text -> reasoning, tool calls -> SSE

Needs ``pip install 'cotrt[server]'``. `cotrt.server.app.build_app` makes the ASGI application,
`cotrt.server.serving.serve` runs it under uvicorn.
"""
