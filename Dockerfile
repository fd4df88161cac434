# docker build -t fairseq-ccpr . && docker run --rm --network none fairseq-ccpr demo
FROM python:3.12-slim
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE constraints.txt ./
COPY fairseq_ccpr fairseq_ccpr
COPY datastores/demo datastores/demo
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt ".[cpu,serve]" \
    && rm -rf /src
WORKDIR /data
ENV OMP_WAIT_POLICY=PASSIVE
ENTRYPOINT ["fairseq-ccpr"]
CMD ["--help"]
