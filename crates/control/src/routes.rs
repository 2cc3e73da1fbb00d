//! The paths of the interface, each with its description.

mod described;
mod points;
mod turns;

use self::described::Described;
use self::turns::{ending, limited, on_disk};

use crate::api::{
    AddDisk, AddExport, ChangeDisk, CommitDisk, CompactDisk, Disk, Disks, ErrorBody, Export, Exports, Job, Jobs,
    LimitJob, MirrorDisk, RebaseDisk, Reloaded, Reopen, Resize, Snapshot, Stats, StreamDisk, VERSION, Version,
};
use crate::events::now_ms;
use crate::failure::Failure;
use crate::from_json;
use crate::manager::Manager;
use crate::server::AtWork;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, Path, Query, Request, State};
use axum::http::{StatusCode, header};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::convert::Infallible;
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tokio_stream::Stream;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::wrappers::errors::BroadcastStreamRecvError;
use utoipa::{IntoParams, OpenApi};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// A request's body is small: longer ones are refused.
const BODY_MAX_BYTES: usize = 256 << 10;
/// A client that sends its body slower than this is disconnected.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

type Shared = State<Arc<Manager>>;
type Answer<T> = Result<Json<T>, Failure>;

#[derive(OpenApi)]
#[openapi(info(
    title = "Ringdisk's control interface",
    description = "Manage disks while their guests run. Each error has a body with `error.kind`, `error.message` and, \
                   where it can be said, `error.field`."
))]
struct Description;

/// The description of the interface.
#[must_use]
pub fn openapi() -> utoipa::openapi::OpenApi {
    described().1
}

fn described() -> (Router<Arc<Manager>>, utoipa::openapi::OpenApi) {
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(version))
        .routes(routes!(list_disks, add_disk))
        .routes(routes!(show_disk, change_disk, remove_disk))
        .routes(routes!(resize_disk))
        .routes(routes!(resume_disk))
        .routes(routes!(reopen_disk))
        .routes(routes!(commit_disk))
        .routes(routes!(stream_disk))
        .routes(routes!(rebase_disk))
        .routes(routes!(compact_disk))
        .routes(routes!(mirror_disk))
        .routes(routes!(snapshot_disks))
        .merge(points::routes())
        .routes(routes!(list_exports, add_export))
        .routes(routes!(remove_export))
        .routes(routes!(list_jobs))
        .routes(routes!(show_job, forget_job))
        .routes(routes!(cancel_job))
        .routes(routes!(pause_job))
        .routes(routes!(resume_job))
        .routes(routes!(limit_job))
        .routes(routes!(stats))
        .routes(routes!(metrics))
        .routes(routes!(events))
        .routes(routes!(reload))
        .routes(routes!(shutdown))
        .routes(routes!(describe))
        .split_for_parts()
}

/// Returns the interface over `manager`.
pub(crate) fn router(manager: Arc<Manager>) -> Router {
    let (router, description) = described();
    let described = Arc::new(Described::new(&description));
    router
        .route_layer(axum::middleware::from_fn_with_state(described, described::refuse_other))
        .fallback(async |request: Request| Failure::not_found(format!("there is no path '{}'", request.uri().path())))
        .method_not_allowed_fallback(async |request: Request| {
            let what = format!("{} is not for the path '{}'", request.method(), request.uri().path());
            (StatusCode::METHOD_NOT_ALLOWED, Json(ErrorBody { error: Failure::bad_request(what).0 }))
        })
        .with_state(manager)
}

/// A body of JSON. Errors name the wrong field.
struct Body<T>(T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Failure;

    async fn from_request(mut request: Request, state: &S) -> Result<Self, Failure> {
        let limit = axum::extract::DefaultBodyLimit::max(BODY_MAX_BYTES);
        limit.apply(&mut request);
        let read = tokio::time::timeout(BODY_TIMEOUT, Bytes::from_request(request, state)).await;
        let bytes = match read {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(BytesRejection::FailedToBufferBody(error))) => {
                return Err(Failure::bad_request(format!("the request's body cannot be read: {error}")));
            }
            Ok(Err(_)) => return Err(Failure::bad_request("the request's body cannot be read")),
            Err(_) => return Err(Failure::bad_request("the request's body comes too slowly")),
        };
        // A missing body means no options.
        let bytes = if bytes.is_empty() { Bytes::from_static(b"{}") } else { bytes };
        let value = from_json::object(&bytes).map_err(|wrong| {
            let failure = Failure::bad_request(format!("the request's body is not what is asked for: {}", wrong.what));
            match &wrong.field {
                Some(field) => failure.in_field(field),
                None => failure,
            }
        })?;
        Ok(Self(value))
    }
}

/// Runs a call that may block on a thread beside the one that serves the socket.
async fn beside<T: Send + 'static>(
    manager: Arc<Manager>,
    call: impl FnOnce(&Arc<Manager>) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let _at_work = AtWork::begin();
    let ended = tokio::task::spawn_blocking(move || call(&manager)).await;
    let panicked = |_| Err(Failure::new(crate::api::ErrorKind::Internal, "the call panicked: see the daemon's log"));
    ended.unwrap_or_else(panicked)
}

fn known(manager: &Manager, name: &str) -> Result<(), Failure> {
    match manager.knows(name) {
        true => Ok(()),
        false => Err(Failure::not_found(manager.no_disk(name))),
    }
}

/// Program and version
#[utoipa::path(get, path = "/v1/version", responses((status = 200, body = Version), (status = "default", body = ErrorBody)))]
async fn version() -> Json<Version> {
    let program = format!("ringdisk {}", env!("CARGO_PKG_VERSION"));
    Json(Version { program, api: VERSION, pid: std::process::id() })
}

/// All disks
#[utoipa::path(get, path = "/v1/disks", responses((status = 200, body = Disks), (status = "default", body = ErrorBody)))]
async fn list_disks(State(manager): Shared) -> Answer<Disks> {
    beside(manager, |manager| Ok(Disks { disks: manager.disks(), failed: manager.failed_disks() })).await.map(Json)
}

/// Add a disk
#[utoipa::path(post, path = "/v1/disks", request_body = AddDisk,
    responses((status = 201, body = Disk), (status = "default", body = ErrorBody)))]
async fn add_disk(State(manager): Shared, Body(request): Body<AddDisk>) -> Result<(StatusCode, Json<Disk>), Failure> {
    let disk = request.options.get("name").or(request.options.get("file")).unwrap_or_default().to_owned();
    let added = limited(manager, vec![disk], |manager| {
        manager.add_disk(request).map_err(|error| Failure::from(error).in_field("options"))
    });
    Ok((StatusCode::CREATED, Json(added.await?)))
}

/// One disk
#[utoipa::path(get, path = "/v1/disks/{name}", params(("name" = String, Path)),
    responses((status = 200, body = Disk), (status = "default", body = ErrorBody)))]
async fn show_disk(State(manager): Shared, Path(name): Path<String>) -> Answer<Disk> {
    let shown = beside(manager, move |manager| {
        known(manager, &name)?;
        Ok(manager.disk(&name)?)
    });
    shown.await.map(Json)
}

/// Change options of a disk while it runs
#[utoipa::path(patch, path = "/v1/disks/{name}", params(("name" = String, Path)), request_body = ChangeDisk,
    responses((status = 200, body = Disk), (status = "default", body = ErrorBody)))]
async fn change_disk(
    State(manager): Shared,
    Path(name): Path<String>,
    Body(request): Body<ChangeDisk>,
) -> Answer<Disk> {
    let changed = on_disk(manager, name, move |manager, name| {
        manager.change_disk(name, &request).map_err(|error| Failure::from(error).in_field("options"))
    });
    changed.await.map(Json)
}

/// How a disk is removed.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Removal {
    /// Whether to disconnect its guests and cancel its jobs first. Without it, a disk with either is refused.
    #[serde(default)]
    force: bool,
}

/// Remove a disk
#[utoipa::path(delete, path = "/v1/disks/{name}", params(("name" = String, Path), Removal),
    responses((status = 204), (status = "default", body = ErrorBody)))]
async fn remove_disk(
    State(manager): Shared,
    Path(name): Path<String>,
    query: Result<Query<Removal>, axum::extract::rejection::QueryRejection>,
) -> Result<StatusCode, Failure> {
    // It has one field, and others are refused before.
    let wrong = |_| Failure::bad_request("the parameter 'force' is given once, as true or false").in_field("force");
    let Query(removal) = query.map_err(wrong)?;
    known(&manager, &name)?;
    let removed = ending(manager, move |manager| {
        known(manager, &name)?;
        Ok(manager.remove_disk(&name, removal.force)?)
    });
    removed.await.map(|()| StatusCode::NO_CONTENT)
}

/// Make a disk larger while it runs
#[utoipa::path(post, path = "/v1/disks/{name}/resize", params(("name" = String, Path)), request_body = Resize,
    responses((status = 200, body = Disk), (status = "default", body = ErrorBody)))]
async fn resize_disk(State(manager): Shared, Path(name): Path<String>, Body(request): Body<Resize>) -> Answer<Disk> {
    let resized = on_disk(manager, name, move |manager, name| {
        manager.resize(name, request.size_bytes).map_err(|error| Failure::from(error).in_field("size_bytes"))
    });
    resized.await.map(Json)
}

/// Reopen the files of a disk while it runs: one was replaced, or changed behind the disk
#[utoipa::path(post, path = "/v1/disks/{name}/reopen", params(("name" = String, Path)), request_body = Reopen,
    responses((status = 200, body = Disk), (status = "default", body = ErrorBody)))]
async fn reopen_disk(State(manager): Shared, Path(name): Path<String>, Body(request): Body<Reopen>) -> Answer<Disk> {
    let reopened = on_disk(manager, name, move |manager, name| Ok(manager.reopen(name, request.force)?));
    reopened.await.map(Json)
}

/// Retry requests that wait because the storage failed them
#[utoipa::path(post, path = "/v1/disks/{name}/resume", params(("name" = String, Path)),
    responses((status = 200, body = Disk), (status = "default", body = ErrorBody)))]
async fn resume_disk(State(manager): Shared, Path(name): Path<String>) -> Answer<Disk> {
    let resumed = beside(manager, move |manager| {
        known(manager, &name)?;
        Ok(manager.resume(&name)?)
    });
    resumed.await.map(Json)
}

/// Start to commit layers of a disk into the layer below them
#[utoipa::path(post, path = "/v1/disks/{name}/commit", params(("name" = String, Path)), request_body = CommitDisk,
    responses((status = 202, body = Job), (status = "default", body = ErrorBody)))]
async fn commit_disk(
    State(manager): Shared,
    Path(name): Path<String>,
    Body(request): Body<CommitDisk>,
) -> Result<(StatusCode, Json<Job>), Failure> {
    let started = on_disk(manager, name, move |manager, name| Ok(manager.commit(name, request)?));
    Ok((StatusCode::ACCEPTED, Json(started.await?)))
}

/// Start to copy the data of lower layers into the top layer of a disk
#[utoipa::path(post, path = "/v1/disks/{name}/stream", params(("name" = String, Path)), request_body = StreamDisk,
    responses((status = 202, body = Job), (status = "default", body = ErrorBody)))]
async fn stream_disk(
    State(manager): Shared,
    Path(name): Path<String>,
    Body(request): Body<StreamDisk>,
) -> Result<(StatusCode, Json<Job>), Failure> {
    let started = on_disk(manager, name, move |manager, name| Ok(manager.stream(name, &request)?));
    Ok((StatusCode::ACCEPTED, Json(started.await?)))
}

/// Start to give the top layer of a disk another backing file
#[utoipa::path(post, path = "/v1/disks/{name}/rebase", params(("name" = String, Path)), request_body = RebaseDisk,
    responses((status = 202, body = Job), (status = "default", body = ErrorBody)))]
async fn rebase_disk(
    State(manager): Shared,
    Path(name): Path<String>,
    Body(request): Body<RebaseDisk>,
) -> Result<(StatusCode, Json<Job>), Failure> {
    let started = on_disk(manager, name, move |manager, name| Ok(manager.rebase(name, &request)?));
    Ok((StatusCode::ACCEPTED, Json(started.await?)))
}

/// Start to make the file of a disk's top layer shorter
#[utoipa::path(post, path = "/v1/disks/{name}/compact", params(("name" = String, Path)), request_body = CompactDisk,
    responses((status = 202, body = Job), (status = "default", body = ErrorBody)))]
async fn compact_disk(
    State(manager): Shared,
    Path(name): Path<String>,
    Body(request): Body<CompactDisk>,
) -> Result<(StatusCode, Json<Job>), Failure> {
    let started = on_disk(manager, name, move |manager, name| Ok(manager.compact(name, request)?));
    Ok((StatusCode::ACCEPTED, Json(started.await?)))
}

/// Start to copy a disk to another image, which then takes its place or stays a copy
#[utoipa::path(post, path = "/v1/disks/{name}/mirror", params(("name" = String, Path)), request_body = MirrorDisk,
    responses((status = 202, body = Job), (status = "default", body = ErrorBody)))]
async fn mirror_disk(
    State(manager): Shared,
    Path(name): Path<String>,
    Body(request): Body<MirrorDisk>,
) -> Result<(StatusCode, Json<Job>), Failure> {
    let started = on_disk(manager, name, move |manager, name| Ok(manager.mirror(name, &request)?));
    Ok((StatusCode::ACCEPTED, Json(started.await?)))
}

/// Put new layers on top of disks, all at one moment
#[utoipa::path(post, path = "/v1/snapshots", request_body = Snapshot,
    responses((status = 201, body = Disks), (status = "default", body = ErrorBody)))]
async fn snapshot_disks(
    State(manager): Shared,
    Body(request): Body<Snapshot>,
) -> Result<(StatusCode, Json<Disks>), Failure> {
    request.overlays.iter().try_for_each(|overlay| known(&manager, &overlay.disk))?;
    let disks = request.overlays.iter().map(|overlay| overlay.disk.clone()).collect();
    let made = limited(manager, disks, move |manager| {
        request.overlays.iter().try_for_each(|overlay| known(manager, &overlay.disk))?;
        Ok(Disks { disks: manager.snapshot(&request.overlays)?, failed: Vec::new() })
    });
    Ok((StatusCode::CREATED, Json(made.await?)))
}

/// All exports
#[utoipa::path(get, path = "/v1/exports", responses((status = 200, body = Exports), (status = "default", body = ErrorBody)))]
async fn list_exports(State(manager): Shared) -> Answer<Exports> {
    beside(manager, |manager| Ok(Exports { exports: manager.exports(), failed: manager.failed_exports() }))
        .await
        .map(Json)
}

/// Add an export of a disk
#[utoipa::path(post, path = "/v1/exports", request_body = AddExport,
    responses((status = 201, body = Export), (status = "default", body = ErrorBody)))]
async fn add_export(
    State(manager): Shared,
    Body(request): Body<AddExport>,
) -> Result<(StatusCode, Json<Export>), Failure> {
    let added = on_disk(manager, request.disk.clone(), move |manager, _| Ok(manager.add_export(request)?));
    Ok((StatusCode::CREATED, Json(added.await?)))
}

/// Remove an export
#[utoipa::path(delete, path = "/v1/exports/{id}", params(("id" = u64, Path)),
    responses((status = 204), (status = "default", body = ErrorBody)))]
async fn remove_export(State(manager): Shared, Path(id): Path<String>) -> Result<StatusCode, Failure> {
    let id = number(&id)?;
    ending(manager, move |manager| manager.remove_export(id)).await.map(|()| StatusCode::NO_CONTENT)
}

/// All jobs
#[utoipa::path(get, path = "/v1/jobs", responses((status = 200, body = Jobs), (status = "default", body = ErrorBody)))]
async fn list_jobs(State(manager): Shared) -> Answer<Jobs> {
    beside(manager, |manager| Ok(Jobs { jobs: manager.jobs() })).await.map(Json)
}

/// One job
#[utoipa::path(get, path = "/v1/jobs/{id}", params(("id" = u64, Path)),
    responses((status = 200, body = Job), (status = "default", body = ErrorBody)))]
async fn show_job(State(manager): Shared, Path(id): Path<String>) -> Answer<Job> {
    let id = number(&id)?;
    beside(manager, move |manager| manager.job(id)).await.map(Json)
}

/// Remove an ended job from the list
#[utoipa::path(delete, path = "/v1/jobs/{id}", params(("id" = u64, Path)),
    responses((status = 204), (status = "default", body = ErrorBody)))]
async fn forget_job(State(manager): Shared, Path(id): Path<String>) -> Result<StatusCode, Failure> {
    let id = number(&id)?;
    beside(manager, move |manager| manager.forget_job(id)).await.map(|()| StatusCode::NO_CONTENT)
}

/// Ask a job to stop
#[utoipa::path(post, path = "/v1/jobs/{id}/cancel", params(("id" = u64, Path)),
    responses((status = 200, body = Job), (status = "default", body = ErrorBody)))]
async fn cancel_job(State(manager): Shared, Path(id): Path<String>) -> Answer<Job> {
    let id = number(&id)?;
    beside(manager, move |manager| manager.cancel_job(id)).await.map(Json)
}

/// Pause a job
#[utoipa::path(post, path = "/v1/jobs/{id}/pause", params(("id" = u64, Path)),
    responses((status = 200, body = Job), (status = "default", body = ErrorBody)))]
async fn pause_job(State(manager): Shared, Path(id): Path<String>) -> Answer<Job> {
    let id = number(&id)?;
    beside(manager, move |manager| manager.pause_job(id, true)).await.map(Json)
}

/// Continue a paused job
#[utoipa::path(post, path = "/v1/jobs/{id}/resume", params(("id" = u64, Path)),
    responses((status = 200, body = Job), (status = "default", body = ErrorBody)))]
async fn resume_job(State(manager): Shared, Path(id): Path<String>) -> Answer<Job> {
    let id = number(&id)?;
    beside(manager, move |manager| manager.pause_job(id, false)).await.map(Json)
}

/// Limit how fast a job works
#[utoipa::path(post, path = "/v1/jobs/{id}/limit", params(("id" = u64, Path)), request_body = LimitJob,
    responses((status = 200, body = Job), (status = "default", body = ErrorBody)))]
async fn limit_job(State(manager): Shared, Path(id): Path<String>, Body(request): Body<LimitJob>) -> Answer<Job> {
    let id = number(&id)?;
    beside(manager, move |manager| manager.limit_job(id, request.bytes_per_second)).await.map(Json)
}

/// Figures of disks and reactors
#[utoipa::path(get, path = "/v1/stats", responses((status = 200, body = Stats), (status = "default", body = ErrorBody)))]
async fn stats(State(manager): Shared) -> Answer<Stats> {
    beside(manager, |manager| Ok(manager.stats())).await.map(Json)
}

/// Figures for Prometheus
#[utoipa::path(get, path = "/metrics",
    responses((status = 200, body = String, content_type = "application/openmetrics-text; version=1.0.0"),
        (status = "default", body = ErrorBody)))]
async fn metrics(State(manager): Shared) -> Result<Response, Failure> {
    let render = |manager: &Arc<Manager>| {
        crate::metrics::render(manager)
            .map_err(|_| Failure::new(crate::api::ErrorKind::Internal, "cannot write metrics"))
    };
    let text = beside(manager, render).await?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

/// All later events, as server-sent events; the data of each are an `Event`
#[utoipa::path(get, path = "/v1/events", responses((status = 200, body = crate::api::Event, content_type = "text/event-stream"),
        (status = "default", body = ErrorBody)))]
async fn events(State(manager): Shared) -> Result<Sse<impl Stream<Item = Result<SseEvent, Infallible>>>, Failure> {
    let watching = (manager.storage_calls.watch()?, AtWork::begin());
    let events = BroadcastStream::new(manager.events()).map(move |event| {
        let _watching = &watching;
        let event = event.unwrap_or_else(|BroadcastStreamRecvError::Lagged(count)| crate::api::Event {
            number: 0,
            time_ms: now_ms(),
            kind: crate::api::EventKind::EventsLost,
            disk: None,
            id: None,
            message: Some(format!("{count} events were not fetched fast enough")),
        });
        let data = serde_json::to_string(&event).unwrap_or_default();
        Ok(SseEvent::default().id(event.number.to_string()).data(data))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}

/// Read the configuration file again, and apply the differences
#[utoipa::path(post, path = "/v1/reload",
    responses((status = 200, body = Reloaded), (status = "default", body = ErrorBody)))]
async fn reload(State(manager): Shared) -> Answer<Reloaded> {
    limited(manager, vec!["the configuration file".to_owned()], |manager| Ok(manager.reload()?)).await.map(Json)
}

/// End the daemon
#[utoipa::path(post, path = "/v1/shutdown", responses((status = 202), (status = "default", body = ErrorBody)))]
async fn shutdown(State(manager): Shared) -> StatusCode {
    manager.ask_to_end();
    StatusCode::ACCEPTED
}

/// This description
#[utoipa::path(get, path = "/v1/openapi.json", responses((status = 200, body = serde_json::Value), (status = "default", body = ErrorBody)))]
async fn describe() -> Response {
    static TEXT: LazyLock<Bytes> = LazyLock::new(|| serde_json::to_vec(&openapi()).unwrap_or_default().into());
    ([(header::CONTENT_TYPE, "application/json")], TEXT.clone()).into_response()
}

fn number(text: &str) -> Result<u64, Failure> {
    text.parse().map_err(|_| Failure::not_found(format!("'{text}' is not a number")))
}
