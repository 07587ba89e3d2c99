#!/bin/sh
# A newcomer's first hour: a clone of this commit in a root with nothing but Debian's Python, git and make; what README
# and docs print, as root and as an unprivileged user, without any variable of ours. Needs root, and debootstrap.
#
#   tests/bare.sh [FOLDER]     made there, and kept for the next run; default .tools/bare
set -eu
project=$(cd "$(dirname "$0")/.." && pwd)
root=${1:-$project/.tools/bare}
command -v debootstrap >/dev/null || { echo "bare: needs debootstrap (apt install debootstrap)" >&2; exit 2; }
[ "$(id -u)" = 0 ] || { echo "bare: needs root, to make the folder and enter it" >&2; exit 2; }
if [ ! -e "$root/made" ]; then
    debootstrap --variant=minbase --include=python3,python3-venv,git,make,ca-certificates bookworm "$root"
    chroot "$root" useradd -m user
    touch "$root/made"
fi
# How this machine reaches the network.
cp /etc/resolv.conf /etc/hosts "$root/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
if [ -e /etc/pip.conf ]; then cp /etc/pip.conf "$root/etc/"; fi

cat > "$root/hour.sh" <<'E2'
set -eu
mount --rbind "$1" "$1" && cd "$1"
mkdir -p outside && pivot_root . outside && cd /
for kind in proc sys dev; do mount --rbind /outside/$kind /$kind; done
umount -l /outside
status=0
hour() { # user, home, command line
    begun=$(date +%s)
    if su "$1" -c "cd $2/src && env -i HOME=$2 PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin sh -ec '$3'" > /tmp/said 2>&1
    then echo "ok    $(($(date +%s) - begun)) s  $1: $3"
    else echo "FAIL  $1: $3"; tail -20 /tmp/said; status=1
    fi
}
for who in root user; do
    home=$(getent passwd $who | cut -d: -f6)
    hour $who "$home" "make demo"
    hour $who "$home" "make demo MODE=inpod"
    hour $who "$home" "make demo MODE=policy"
    hour $who "$home" "python3 -m venv ~/installed && ~/installed/bin/pip install -q . && ~/installed/bin/ztunnel --version"
    hour $who "$home" "~/installed/bin/ztunnel proxy --bootstrap examples/bootstrap.yaml --validate"
    hour $who "$home" "LOCAL_XDS_PATH=examples/local.yaml NODE_NAME=worker ~/installed/bin/ztunnel proxy --validate"
    hour $who "$home" "~/installed/bin/ztunnel control-plane --check examples/mesh.yaml"
    hour $who "$home" "~/installed/bin/ztunnel policy check examples/policy/policies.yaml examples/policy/pods.yaml"
done
exit $status
E2

for home in root home/user; do
    rm -rf "${root:?}/$home/src" "$root/$home/installed"
    git clone -q "$project" "$root/$home/src"
done
chroot "$root" chown -R user:user /home/user
exec unshare --mount --propagation private sh "$root/hour.sh" "$root"
