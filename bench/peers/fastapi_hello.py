"""FastAPI's hello, to which bench/http_batch.py compares our service; the server has the same parts.

python bench/peers/fastapi_hello.py PORT
"""

import sys

import uvicorn
from fastapi import FastAPI

app = FastAPI()


@app.get("/")
async def hello() -> dict[str, str]:
    return {"hello": "world"}


if __name__ == "__main__":
    uvicorn.run(
        app, host="127.0.0.1", port=int(sys.argv[1]), loop="uvloop", http="httptools", log_level="error"
    )
