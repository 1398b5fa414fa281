# docker build -t fedjax_sim . && docker run --rm -v "$PWD/runs:/work/runs" fedjax_sim run quickstart
# With NVIDIA GPUs: docker build --build-arg EXTRAS=plot,cuda -t fedjax_sim . && docker run --rm --gpus all fedjax_sim run
FROM python:3.13-slim
ARG EXTRAS=plot
WORKDIR /src
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY fedjax_sim fedjax_sim
COPY experiments experiments
RUN pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]"
WORKDIR /work
ENTRYPOINT ["fedjax-sim"]
CMD ["run"]
