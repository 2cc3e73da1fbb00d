//! The paths for bitmaps, internal snapshots and backups.

use super::{Answer, Body, Shared, on_disk};
use crate::api::{BackupDisk, Bitmaps, ChangeBitmaps, CreateSnapshot, ErrorBody, InternalSnapshots, Job};
use crate::failure::Failure;
use crate::manager::Manager;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use std::sync::Arc;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<Manager>> {
    OpenApiRouter::new()
        .routes(routes!(list_bitmaps, change_bitmaps))
        .routes(routes!(list_snapshots, create_snapshot))
        .routes(routes!(delete_snapshot))
        .routes(routes!(apply_snapshot))
        .routes(routes!(backup_disk))
}

/// The persistent dirty bitmaps of a disk
#[utoipa::path(get, path = "/v1/disks/{name}/bitmaps", params(("name" = String, Path)),
    responses((status = 200, body = Bitmaps), (status = "default", body = ErrorBody)))]
async fn list_bitmaps(State(manager): Shared, Path(name): Path<String>) -> Answer<Bitmaps> {
    let listed = on_disk(manager, name, move |manager, name| Ok(manager.bitmaps(name)?));
    listed.await.map(Json)
}

/// Add, change and remove persistent dirty bitmaps of a disk's top layer: all the requested changes, or none
#[utoipa::path(post, path = "/v1/disks/{name}/bitmaps", params(("name" = String, Path)), request_body = ChangeBitmaps,
    responses((status = 200, body = Bitmaps), (status = "default", body = ErrorBody)))]
async fn change_bitmaps(
    State(manager): Shared,
    Path(name): Path<String>,
    Body(request): Body<ChangeBitmaps>,
) -> Answer<Bitmaps> {
    let changed = on_disk(manager, name, move |manager, name| {
        manager.change_bitmaps(name, &request).map_err(|error| Failure::from(error).in_field("actions"))
    });
    changed.await.map(Json)
}

/// The internal snapshots of a disk's top layer
#[utoipa::path(get, path = "/v1/disks/{name}/snapshots", params(("name" = String, Path)),
    responses((status = 200, body = InternalSnapshots), (status = "default", body = ErrorBody)))]
async fn list_snapshots(State(manager): Shared, Path(name): Path<String>) -> Answer<InternalSnapshots> {
    let listed = on_disk(manager, name, move |manager, name| Ok(manager.internal_snapshots(name)?));
    listed.await.map(Json)
}

/// Take an internal snapshot of a disk while it runs
#[utoipa::path(post, path = "/v1/disks/{name}/snapshots", params(("name" = String, Path)),
    request_body = CreateSnapshot,
    responses((status = 201, body = InternalSnapshots), (status = "default", body = ErrorBody)))]
async fn create_snapshot(
    State(manager): Shared,
    Path(name): Path<String>,
    Body(request): Body<CreateSnapshot>,
) -> Result<(StatusCode, Json<InternalSnapshots>), Failure> {
    let taken = on_disk(manager, name, move |manager, name| {
        Ok(manager.create_internal_snapshot(name, &request.name, request.vm_state.as_ref())?)
    });
    Ok((StatusCode::CREATED, Json(taken.await?)))
}

/// Delete an internal snapshot, named by its id or name, while the disk runs
#[utoipa::path(delete, path = "/v1/disks/{name}/snapshots/{snapshot}",
    params(("name" = String, Path), ("snapshot" = String, Path)),
    responses((status = 204), (status = "default", body = ErrorBody)))]
async fn delete_snapshot(
    State(manager): Shared,
    Path((name, snapshot)): Path<(String, String)>,
) -> Result<StatusCode, Failure> {
    let deleted = on_disk(manager, name, move |manager, name| Ok(manager.delete_internal_snapshot(name, &snapshot)?));
    deleted.await.map(|()| StatusCode::NO_CONTENT)
}

/// Return a disk that no guest uses to its contents when the snapshot was taken
#[utoipa::path(post, path = "/v1/disks/{name}/snapshots/{snapshot}/apply",
    params(("name" = String, Path), ("snapshot" = String, Path)),
    responses((status = 200, body = InternalSnapshots), (status = "default", body = ErrorBody)))]
async fn apply_snapshot(
    State(manager): Shared,
    Path((name, snapshot)): Path<(String, String)>,
) -> Answer<InternalSnapshots> {
    let applied = on_disk(manager, name, move |manager, name| Ok(manager.apply_internal_snapshot(name, &snapshot)?));
    applied.await.map(Json)
}

/// Start to copy a disk, as it is at one moment, to another image
#[utoipa::path(post, path = "/v1/disks/{name}/backup", params(("name" = String, Path)), request_body = BackupDisk,
    responses((status = 202, body = Job), (status = "default", body = ErrorBody)))]
async fn backup_disk(
    State(manager): Shared,
    Path(name): Path<String>,
    Body(request): Body<BackupDisk>,
) -> Result<(StatusCode, Json<Job>), Failure> {
    let started = on_disk(manager, name, move |manager, name| Ok(manager.backup(name, request)?));
    Ok((StatusCode::ACCEPTED, Json(started.await?)))
}
