# docker build --tag zerovision .
# docker run --rm --gpus all --shm-size=8g --read-only --tmpfs /tmp --user 12345 -v ~/photos:/data:ro -v ~/logs:/logs \
#     zerovision bash scripts/launch_distributed.sh mobilenet ddp 8 16 50 --data /data --log-dir /logs
# Any user id, without an entry in passwd; nothing is written but --log-dir and /tmp.
FROM python:3.11-slim-bookworm

# g++ for DeepSpeed's operators, libjpeg's headers for our JPEG reader.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libjpeg62-turbo-dev make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/zerovision
COPY . .
RUN make setup && .venv/bin/python -m compileall -q zerovision models

# For a user without a home folder and a root that cannot be written: caches and compiled operators go to /tmp.
ENV HOME=/tmp
ENV USER=zerovision
ENV TORCH_EXTENSIONS_DIR=/tmp/torch_extensions
ENV PATH=/opt/zerovision/.venv/bin:/usr/local/bin:/usr/bin:/bin

CMD ["bash", "scripts/launch_distributed.sh", "--help"]
