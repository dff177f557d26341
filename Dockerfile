# The commands and what they need, without data. docs/deploy.md says how to build and run it.
FROM python:3.12-slim-bookworm

# cpu, or a version of CUDA such as cu128: its libraries come with torch, the driver from the host.
ARG TORCH=cpu

# What opencv-python loads.
RUN apt-get update && apt-get install --yes --no-install-recommends libgl1 libglib2.0-0 && rm -rf /var/lib/apt/lists/*

WORKDIR /tessera
COPY pyproject.toml ./
# With bytecode, also of the standard library, of which the base image has none: else each process that a container
# starts would compile torch's sources, which takes longer than the rest of its imports.
RUN pip install --no-cache-dir uv \
    && uv pip install --system --no-cache --compile-bytecode --torch-backend "$TORCH" -r pyproject.toml \
        --extra export --extra openvino --extra safetensors \
    && python -m compileall -q -x "site-packages|test" /usr/local/lib/python3.12
COPY . .

# The process may have any user's number (docker run --user), so the folders that it writes to are everyone's.
RUN python -m compileall -q . && useradd tessera && mkdir -p datasets runs /cache && chmod 1777 datasets runs /cache
ENV HOME=/cache USER=tessera TESSERA_CACHE=/cache/tessera PYTHONDONTWRITEBYTECODE=1 ORT_DISABLE_TELEMETRY=1
USER tessera
ENTRYPOINT ["python"]
CMD ["train.py", "--help"]
