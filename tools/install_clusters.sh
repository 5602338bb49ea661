#!/bin/sh
# Installs what the tests of real clusters run on: Slurm, Open MPI, ssh and iproute2 as packages of Debian, where this is
# allowed to; MPICH into a virtual environment of its own, because its commands have the names of Open MPI's.
# What cannot be installed is told, and is no error: the tests that need it are skipped.
#
# usage: install_clusters.sh FOLDER_FOR_MPICH PYTHON
set -eu
packages="slurmd slurmctld slurm-client munge openmpi-bin iproute2 openssh-server openssh-client"

missing=""
for package in $packages; do
    case "$(dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null || true)" in
        *" installed") ;;
        *) missing="$missing $package" ;;
    esac
done
if [ -z "$missing" ]; then
    :
elif [ ! -e /etc/debian_version ] || ! command -v apt-get >/dev/null; then
    echo "not installed:$missing: only done on Debian; install these by your own system's means"
elif [ "$(id -u)" != 0 ]; then
    echo "not installed:$missing: only root may; try: sudo apt-get install --no-install-recommends$missing"
elif ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $missing; }
then
    echo "not installed:$missing: apt-get has failed, see above"
fi
# The tests start an sshd of their own: one that only they have asked for must not let anybody into this machine.
case "$missing" in
    *openssh-server*) systemctl disable --now ssh.service ssh.socket >/dev/null 2>&1 || true ;;
esac

if [ ! -x "$1/bin/mpiexec.hydra" ]; then
    { "$2" "$(dirname "$0")/bootstrap_venv.py" "$1" &&
        "$1/bin/python" -m pip install --quiet --disable-pip-version-check mpich; } ||
        echo "not installed: MPICH, see above"
fi
