FROM python:3.12
COPY . /lineartime
RUN pip install --no-cache-dir -c /lineartime/constraints.txt "/lineartime[report]"
